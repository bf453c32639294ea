"""Boxes that tile, and boxes that don't."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_checkpoint.tiling import fault, find_overlap
from hp_mesh import Box, shard_bounds


@pytest.mark.parametrize(
    ("shape", "boxes", "text"),
    [
        ((4,), [Box((0,), (2,)), Box((1,), (3,))], "overlap"),
        ((4,), [Box((0,), (5,))], "outside"),
        ((4,), [Box((0,), (4,)), Box((4,), (0,))], "empty"),
        ((4,), [Box((0, 0), (4, 1))], "2 dims"),
        ((), [], "0 of 1"),
        ((), [Box((), ()), Box((), ())], "overlap"),
        ((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (1, 2))], "overlap"),
    ],
)
def test_fault_of_wrong_boxes_says_why(shape: tuple[int, ...], boxes: list[Box], text: str) -> None:
    found = fault(shape, boxes)

    assert found is not None
    assert text in found


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [((), [Box((), ())]), ((0, 3), []), ((2,), [Box((1,), (1,)), Box((0,), (1,))])],
)
def test_fault_of_a_tiling_is_none(shape: tuple[int, ...], boxes: list[Box]) -> None:
    assert fault(shape, boxes) is None


@settings(deadline=None)  # other work on the machine is no fault
@given(st.tuples(*[st.integers(1, 7)] * 3), st.tuples(*[st.integers(1, 4)] * 3))
def test_fault_of_any_grid_is_none(shape: tuple[int, ...], parts: tuple[int, ...]) -> None:
    bounds = [
        [shard_bounds(size, num, i) for i in range(num)]
        for size, num in zip(shape, parts, strict=True)
    ]
    boxes = [
        Box(tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        for corner in itertools.product(*bounds)
    ]

    assert fault(shape, [box for box in boxes if box.num_elements]) is None


@settings(deadline=None)  # other work on the machine is no fault
@given(st.data())
def test_find_overlap_agrees_with_counting_elements(data: st.DataObject) -> None:
    spans = st.tuples(st.integers(0, 4), st.integers(1, 3))
    drawn = data.draw(st.lists(st.tuples(spans, spans), max_size=5))
    boxes = [Box((a[0], b[0]), (a[1], b[1])) for a, b in drawn]
    count = np.zeros((8, 8), int)
    for box in boxes:
        count[box.slices()] += 1

    assert (find_overlap(boxes) is not None) == bool((count > 1).any())
