"""What hp_mesh asks of a framework: who this process is, and process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class GroupRuntime(Protocol):
    """The framework's process groups."""

    def is_initialized(self) -> bool:
        """Tell whether the default process group is there."""
        ...

    def initialize(self, device_type: str) -> None:
        """Make the default process group from the launcher's environment variables."""
        ...

    def rank(self) -> int:
        """Return this process's global rank."""
        ...

    def world_size(self) -> int:
        """Return the number of processes of the job."""
        ...

    def default_group(self) -> object:
        """Return the group of all processes; another object after each initialisation."""
        ...

    def new_group(self, ranks: Sequence[int]) -> object:
        """Make a group numbered in this order; every member calls this, nobody else has to."""
        ...
