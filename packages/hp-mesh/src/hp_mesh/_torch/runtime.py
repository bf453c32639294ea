"""Process groups of torch.distributed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from hp_mesh.errors import MeshStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchGroupRuntime:
    """Implements `hp_mesh.ports.GroupRuntime`."""

    def is_initialized(self) -> bool:
        """Tell whether the default process group is there."""
        return dist.is_available() and dist.is_initialized()

    def initialize(self, device_type: str) -> None:
        """Make the default process group from torchrun's environment variables.

        Raises:
            MeshStateError: They aren't set.
        """
        missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            raise MeshStateError(
                f"a mesh needs process groups, and there are none: torch.distributed isn't "
                f"initialised and {missing} aren't in the environment. Start the script with "
                f"torchrun, or call torch.distributed.init_process_group first."
            )
        dist.init_process_group("gloo" if device_type == "cpu" else None)

    def rank(self) -> int:
        """Return this process's global rank."""
        return dist.get_rank()

    def world_size(self) -> int:
        """Return the number of processes of the job."""
        self.default_group()
        return dist.get_world_size()

    def default_group(self) -> object:
        """Return the group of all processes.

        Raises:
            MeshStateError: There is none.
        """
        if not self.is_initialized():
            raise MeshStateError(
                "a process group is asked for and torch.distributed isn't initialised. Call "
                "torch.distributed.init_process_group first."
            )
        return dist.group.WORLD

    def new_group(self, ranks: Sequence[int]) -> object:
        """Make a group whose members are numbered as given; every member calls this."""
        return dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)


RUNTIME = TorchGroupRuntime()
