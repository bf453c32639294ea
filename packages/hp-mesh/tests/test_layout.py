"""The arithmetic of sizes and strides, against grids enumerated by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_mesh import MeshError, MeshLayout

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[MeshLayout, dict[tuple[int, ...], int]]:
    """Draw axes of a dense grid, and where each coordinate on them lies."""
    shape = draw(shapes)
    axes = draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    grid = list(itertools.product(*map(range, shape)))
    places = {
        tuple(point[axis] for axis in axes): place
        for place, point in enumerate(grid)
        if all(point[axis] == 0 for axis in range(len(shape)) if axis not in axes)
    }
    return MeshLayout.dense(shape).select(axes), places


@given(shapes)
def test_dense_layout_counts_positions_in_row_major_order(shape: tuple[int, ...]) -> None:
    layout = MeshLayout.dense(shape)
    assert list(layout.positions()) == list(range(math.prod(shape)))
    assert layout.num_positions == math.prod(shape)


@given(cuts())
def test_selected_axes_lie_where_the_grid_has_them(
    cut: tuple[MeshLayout, dict[tuple[int, ...], int]],
) -> None:
    layout, places = cut
    assert {point: layout.position(point) for point in places} == places


@given(cuts())
def test_coordinate_undoes_position_and_knows_foreign_positions(
    cut: tuple[MeshLayout, dict[tuple[int, ...], int]],
) -> None:
    layout, places = cut
    expected = {place: point for point, place in places.items()}
    around = range(-3, max(expected) + 4)
    assert [layout.coordinate(p) for p in around] == [expected.get(p) for p in around]


@given(cuts())
def test_flatten_keeps_positions_or_refuses_where_they_are_not_evenly_spaced(
    cut: tuple[MeshLayout, dict[tuple[int, ...], int]],
) -> None:
    layout, _ = cut
    expected = list(layout.positions())
    gaps = {b - a for a, b in itertools.pairwise(expected)}
    if len(gaps) <= 1 and all(gap > 0 for gap in gaps):
        assert list(layout.flatten().positions()) == expected
    else:
        with pytest.raises(MeshError, match="can't become one axis"):
            layout.flatten()


def test_flatten_of_axes_that_are_no_neighbours_raises() -> None:
    with pytest.raises(MeshError, match=r"sizes \(2, 2\) and strides \(4, 1\) can't become one"):
        MeshLayout.dense((2, 2, 2)).select([0, 2]).flatten()


def test_flatten_of_axes_of_size_one_gives_one_position() -> None:
    assert MeshLayout.dense((1, 1)).flatten().sizes == (1,)
