"""How a rank started for a test joins the process group of its run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HOST = "127.0.0.1"


def join_group(rank: int, world_size: int, channel: Connection) -> None:
    """Initialise torch.distributed over gloo, with one thread.

    Args:
        rank: This process's rank; rank 0 opens the store and sends ("port", number).
        world_size: Number of ranks of the run.
        channel: To the process that started the ranks; it tells every rank the port.
    """
    torch.set_num_threads(1)
    is_first = rank == 0
    if is_first:
        store = TCPStore(HOST, 0, world_size, is_master=True, wait_for_workers=False)
        channel.send(("port", store.port))
    port = channel.recv()
    if not is_first:
        store = TCPStore(HOST, port, world_size, is_master=False)
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
