"""How a tensor lies along one mesh axis.

Pure. Names and meanings are those of torch's placements.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_dtensor.errors import LayoutError


class Placement:
    """What the ranks along one mesh axis hold of a tensor."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether the axis cuts the tensor (on this dim, if one is given)."""
        return False

    def is_replicate(self) -> bool:
        """Tell whether every rank along the axis holds the same."""
        return False


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The axis cuts one dim by the ceil rule; trailing ranks may hold less, or nothing.

    Raises:
        LayoutError: `dim` isn't an int.

    Example:
        >>> Shard(0).is_shard(0)
        True
    """

    dim: int
    """Which dim; negative numbers count from the last one."""

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise LayoutError(f"Shard takes the number of a dim; found {self.dim!r}. Pass an int.")

    def is_shard(self, dim: int | None = None) -> bool:
        """Tell whether the axis cuts the tensor (on this dim, if one is given)."""
        return dim is None or dim == self.dim


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank along the axis holds the same.

    Example:
        >>> Replicate().is_replicate()
        True
    """

    def is_replicate(self) -> bool:
        """Tell whether every rank along the axis holds the same."""
        return True
