"""Which ranks save or load together, from what a user passes as `group`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

import hp_comm
from hp_checkpoint.ports import Alone

if TYPE_CHECKING:
    from hp_checkpoint.ports import Peers


def peers(group: object | None) -> Peers:
    """Return the ranks of a group.

    Args:
        group: What `hp_comm.communicator` takes; None means all ranks, or this process alone
            where no process group was made.

    Example:
        >>> peers(None).ranks
        (0,)
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    found: Peers = hp_comm.communicator(group)
    return found
