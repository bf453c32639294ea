"""Which half-open range of every dim a piece of a tensor covers, and the one rule that cuts dims.

Pure. The ceil rule below is the only copy: meshes, layouts, units and checkpoints all call it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from hp_mesh.errors import MeshError, MeshIndexError, MeshTypeError


def shard_bounds(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return the half-open range of one dim that shard `index` keeps.

    Every shard has `ceil(size / num_shards)` elements, except that the last non-empty one may be
    shorter and the trailing ones may be empty (as `torch.chunk` cuts).

    Args:
        size: Length of the dim, in elements. May be 0.
        num_shards: Number of shards along the axis, at least 1.
        index: Which shard, in `[0, num_shards)`.

    Returns:
        `(start, stop)` in elements, with `0 <= start <= stop <= size`.

    Raises:
        MeshError: `size` is negative or `num_shards` is below 1.
        MeshIndexError: `index` is outside the axis.

    Example:
        >>> [shard_bounds(10, 4, i) for i in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    if size < 0 or num_shards < 1:
        raise MeshError(
            f"shard_bounds was asked to cut {size} elements into {num_shards} shards. Pass a size "
            f"of at least 0 and at least 1 shard."
        )
    if not 0 <= index < num_shards:
        raise MeshIndexError(
            f"shard {index} was asked for, of {num_shards}. Pass an index in [0, {num_shards})."
        )
    length = -(-size // num_shards)
    return min(size, length * index), min(size, length * (index + 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of a tensor: where it starts and how long it is, per dim.

    Raises:
        MeshError: The two tuples differ in length or hold a negative number.
        MeshTypeError: They hold something else than whole numbers.

    Example:
        >>> Box((2, 0), (3, 4)).intersect(Box((0, 1), (4, 9)))
        Box(offsets=(2, 1), sizes=(2, 3))
    """

    offsets: tuple[int, ...]
    """First element of each dim, counted in the whole tensor."""

    sizes: tuple[int, ...]
    """Length of each dim, in elements; 0 for a box that holds nothing."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "offsets", tuple(map(operator.index, self.offsets)))
            object.__setattr__(self, "sizes", tuple(map(operator.index, self.sizes)))
        except TypeError as error:
            raise MeshTypeError(
                f"a box got offsets {self.offsets!r} and sizes {self.sizes!r}. Pass a tuple of "
                f"ints each, one per dim."
            ) from error
        if len(self.offsets) != len(self.sizes):
            raise MeshError(
                f"a box got {len(self.offsets)} offsets {self.offsets} and {len(self.sizes)} "
                f"sizes {self.sizes}. Pass one of each per dim."
            )
        if any(number < 0 for number in (*self.offsets, *self.sizes)):
            raise MeshError(
                f"a box got offsets {self.offsets} and sizes {self.sizes}. Pass numbers of at "
                f"least 0."
            )

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def num_elements(self) -> int:
        """Number of elements inside."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last element of each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    def slices(self) -> tuple[slice, ...]:
        """Return the index that cuts this box out of the whole tensor.

        Example:
            >>> Box((2,), (3,)).slices()
            (slice(2, 5, None),)
        """
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return what both boxes cover, or None if that is nothing.

        Raises:
            MeshError: The boxes have different numbers of dims.
        """
        if self.ndim != other.ndim:
            raise MeshError(
                f"a box of {self.ndim} dims was intersected with one of {other.ndim}. Pass boxes "
                f"of one tensor."
            )
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, other: Box) -> Box:
        """Return this box with its offsets counted from the start of another that holds it.

        Raises:
            MeshError: The other box doesn't hold this one, or has another number of dims.
        """
        outside = self.num_elements and self.intersect(other) != self
        if outside or self.ndim != other.ndim:
            raise MeshError(f"{self} doesn't lie inside {other}. Intersect the two first.")
        offsets = tuple(max(0, a - b) for a, b in zip(self.offsets, other.offsets, strict=True))
        return Box(offsets, self.sizes)
