"""Byte ranges of regions, compared with numpy's own addressing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_checkpoint.ranges import Limits, blocks_of, index_of, slabs, strides_of
from hp_mesh import Box


@st.composite
def regions(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in sizes)
    lengths = tuple(
        draw(st.integers(1, size - start)) for size, start in zip(sizes, offsets, strict=True)
    )
    return sizes, Box(offsets, lengths)


@settings(deadline=None)  # other work on the machine is no fault
@given(regions(), st.integers(1, 40), st.integers(1, 10))
def test_slabs_read_the_region_and_nothing_far_from_it(
    case: tuple[tuple[int, ...], Box], slab_bytes: int, gap_bytes: int
) -> None:
    sizes, region = case
    stored = np.arange(math.prod(sizes), dtype="u2").reshape(sizes)
    data = stored.tobytes()
    found = np.full(sizes, 0xFFFF, "u2")
    read = np.zeros(len(data), bool)

    for slab in slabs(sizes, region, 2, Limits(slab_bytes, gap_bytes)):
        part = memoryview(bytearray(data[slab.begin : slab.end]))
        strides = strides_of(sizes, 2)
        found[index_of(slab.region)] = np.ndarray(slab.region.sizes, "u2", part, strides=strides)
        read[slab.begin : slab.end] = True
        assert slab.end - slab.begin <= max(slab_bytes, 2)

    assert np.array_equal(found[index_of(region)], stored[index_of(region)])
    assert (found != 0xFFFF).sum() == region.num_elements
    needed = np.zeros(sizes, bool)
    needed[index_of(region)] = True
    starts = np.flatnonzero(np.repeat(needed, 2))
    gaps = np.diff(starts) - 1
    wasted = int(read.sum()) - starts.size
    assert wasted <= gaps[gaps < gap_bytes].sum()


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], []),
        ([(0, 1)], [(0, 1)]),
        ([(9, 11)], [(0, 2)]),
        ([(0, 10), (10, 20)], [(0, 2)]),
        ([(25, 26), (0, 1)], [(0, 1), (2, 3)]),
        ([(0, 30), (5, 6)], [(0, 3)]),
    ],
)
def test_blocks_of_ranges_are_sorted_and_disjoint(
    ranges: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert blocks_of(ranges, 10) == expected
