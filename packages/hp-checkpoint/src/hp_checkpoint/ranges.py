"""Which bytes of a stored piece a region needs, and in which portions they are read.

A piece is a box stored in row-major order. A region of it is a set of runs of bytes; runs with less
than a block between them are read in one go, because blocks are what can be verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import EllipsisType


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of a region that is read in one go."""

    begin: int
    """First byte, counted from the start of the piece."""
    end: int
    """First byte after it."""
    region: Box
    """What part of the piece it is, relative to the piece."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How portions are cut."""

    slab_bytes: int
    """The most that is read in one go (one element at least)."""
    gap_bytes: int
    """Runs that are at least this far apart are read each for itself."""


def strides_of(sizes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the distance in bytes between neighbours along each dim, row-major.

    Example:
        >>> strides_of((2, 3, 4), 2)
        (24, 8, 2)
    """
    return tuple(itemsize * prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def index_of(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the index that cuts a box out of an array as a view, also where it has no dims.

    Example:
        >>> index_of(Box((2,), (3,)))
        (slice(2, 5, None), Ellipsis)
    """
    return (*box.slices(), ...)


def slabs(sizes: tuple[int, ...], region: Box, itemsize: int, limits: Limits) -> Iterator[Slab]:
    """Yield the portions in which a region of a stored piece is read, in order of bytes.

    Args:
        sizes: Lengths of the piece's dims, in elements.
        region: A non-empty box relative to the piece.
        itemsize: Bytes of an element.
        limits: How portions are cut.

    Example:
        >>> cuts = Limits(slab_bytes=8, gap_bytes=4)
        >>> [(s.begin, s.end) for s in slabs((4, 4), Box((0, 0), (4, 2)), 1, cuts)]
        [(0, 6), (8, 14)]
        >>> [(s.begin, s.end) for s in slabs((2, 9), Box((0, 0), (2, 2)), 1, cuts)]
        [(0, 2), (9, 11)]
    """
    yield from _cut(strides_of(sizes, itemsize), region, itemsize, limits)


def _cut(strides: tuple[int, ...], region: Box, itemsize: int, limits: Limits) -> Iterator[Slab]:
    spans = _spans(strides, region.sizes, itemsize)
    begin = sum(offset * stride for offset, stride in zip(region.offsets, strides, strict=True))
    dim = next((d for d, size in enumerate(region.sizes) if size > 1), None)
    if dim is None:
        yield Slab(begin, begin + itemsize, region)
        return
    dense = all(
        size == 1 or stride - spans[d + 1] < limits.gap_bytes
        for d, (size, stride) in enumerate(zip(region.sizes, strides, strict=True))
    )
    if dense and spans[0] <= limits.slab_bytes:
        yield Slab(begin, begin + spans[0], region)
        return
    rows = 1
    if dense:
        rows += max(0, limits.slab_bytes - spans[dim + 1]) // strides[dim]
    for row in range(0, region.sizes[dim], rows):
        part = _rows(region, dim, row, min(rows, region.sizes[dim] - row))
        yield from _cut(strides, part, itemsize, limits)


def _spans(strides: tuple[int, ...], sizes: tuple[int, ...], itemsize: int) -> list[int]:
    """Return, per dim, the bytes from first to last element of dims `dim...`; one entry more."""
    spans = [itemsize]
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        spans.append(spans[-1] + (size - 1) * stride)
    return spans[::-1]


def _rows(region: Box, dim: int, start: int, length: int) -> Box:
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim] += start
    sizes[dim] = length
    return Box(tuple(offsets), tuple(sizes))


def blocks_of(ranges: Iterable[tuple[int, int]], block_bytes: int) -> list[tuple[int, int]]:
    """Return runs of blocks that cover byte ranges: sorted, disjoint, as (first, past the last).

    Example:
        >>> blocks_of([(0, 5), (9, 10), (30, 31)], 5)
        [(0, 2), (6, 7)]
    """
    runs: list[tuple[int, int]] = []
    for first, last in sorted(
        (begin // block_bytes, (end - 1) // block_bytes + 1) for begin, end in ranges
    ):
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs
