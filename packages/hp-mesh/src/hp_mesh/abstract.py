"""Shape and axis names of a grid of ranks: what can be said of a mesh without any rank.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hp_mesh.check import check_names, check_shape
from hp_mesh.errors import MeshKeyError


@dataclass(frozen=True, slots=True)
class AbstractMesh:
    """Shape and axis names of a grid of ranks; no ranks, no network.

    Raises:
        MeshError: A size is below 1, or there isn't one distinct name per axis.
        MeshTypeError: The sizes aren't ints, or the names aren't strings.

    Example:
        >>> AbstractMesh((2, 4), ("dp", "tp")).size("tp")
        4
    """

    shape: tuple[int, ...]
    """Number of ranks along each axis."""

    axis_names: tuple[str, ...]
    """Name of each axis."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        object.__setattr__(self, "axis_names", check_names(self.axis_names, len(self.shape)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, of the whole mesh or along one axis."""
        return math.prod(self.shape) if axis is None else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: str | int) -> int:
        """Return the position of an axis given by name or number.

        Raises:
            MeshKeyError: The mesh has no such axis.
        """
        if isinstance(axis, str) and axis in self.axis_names:
            return self.axis_names.index(axis)
        if isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise MeshKeyError(
            f"axis {axis!r} isn't in this mesh: it has {self.axis_names} with sizes {self.shape}. "
            f"Pass one of the names, or a number in [0, {self.ndim})."
        )
