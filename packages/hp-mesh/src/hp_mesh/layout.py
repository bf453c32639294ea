"""The arithmetic of meshes: sizes and strides over a flat list of ranks.

Pure, O(ndim): slicing and flattening never make the array of ranks.

Source: the (shape, stride) layouts of CuTe, as torch's own mesh layout uses them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_mesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Positions of a rank grid: coordinate `c` lies at `sum(c[i] * strides[i])`."""

    sizes: tuple[int, ...]
    """Length of each axis."""

    strides: tuple[int, ...]
    """Distance of neighbours along each axis, in positions of the root's rank list."""

    @classmethod
    def dense(cls, sizes: Sequence[int]) -> MeshLayout:
        """Return the row-major layout of a whole grid.

        Example:
            >>> MeshLayout.dense((2, 3)).strides
            (3, 1)
        """
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return cls(tuple(sizes), tuple(strides))

    @property
    def num_positions(self) -> int:
        """Number of grid points."""
        return math.prod(self.sizes)

    def select(self, axes: Sequence[int]) -> MeshLayout:
        """Return the layout of these axes alone, in this order."""
        return MeshLayout(
            tuple(self.sizes[axis] for axis in axes), tuple(self.strides[axis] for axis in axes)
        )

    def position(self, coordinate: Sequence[int]) -> int:
        """Return where a coordinate lies, counted from this layout's first position."""
        return sum(c * stride for c, stride in zip(coordinate, self.strides, strict=True))

    def positions(self) -> Iterator[int]:
        """Yield all positions in row-major order."""
        for coordinate in itertools.product(*map(range, self.sizes)):
            yield self.position(coordinate)

    def coordinate(self, position: int) -> tuple[int, ...] | None:
        """Return the coordinate at a position, or None where this layout has none there.

        Axes are taken from the largest stride down, which is right for every layout that is cut
        out of a dense one.
        """
        found = [0] * len(self.sizes)
        left = position
        for axis in sorted(range(len(self.sizes)), key=lambda a: -self.strides[a]):
            if self.sizes[axis] > 1:
                found[axis] = min(left // self.strides[axis], self.sizes[axis] - 1)
                left -= found[axis] * self.strides[axis]
        return tuple(found) if left == 0 and position >= 0 else None

    def flatten(self) -> MeshLayout:
        """Return all axes as one.

        Raises:
            MeshError: Their positions aren't evenly spaced in row-major order.
        """
        pairs = [pair for pair in zip(self.sizes, self.strides, strict=True) if pair[0] > 1]
        for (_, outer), (size, inner) in itertools.pairwise(pairs):
            if outer != size * inner:
                raise MeshError(
                    f"axes of sizes {self.sizes} and strides {self.strides} can't become one axis: "
                    f"their ranks aren't evenly spaced. Flatten axes that are neighbours in the "
                    f"root mesh, in its order."
                )
        return MeshLayout((self.num_positions,), (pairs[-1][1] if pairs else 1,))
