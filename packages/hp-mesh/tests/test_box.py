"""Boxes and the rule that cuts dims, against arithmetic on sets of elements.

`chunk_lengths` writes torch.chunk's rule out by hand: take `ceil(size / num_shards)` elements at a
time until nothing is left.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_mesh import Box, MeshError, MeshIndexError, MeshTypeError, shard_bounds


def chunk_lengths(size: int, num_shards: int) -> list[int]:
    lengths, left = [], size
    step = size // num_shards + (1 if size % num_shards else 0)
    for _ in range(num_shards):
        taken = step if left >= step else left
        lengths.append(taken)
        left -= taken
    return lengths


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


def boxes(ndim: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * ndim)
    return st.builds(Box, numbers, numbers)


pairs_of_boxes = st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim)))


@pytest.mark.parametrize(
    ("size", "num_shards", "expected"),
    [
        pytest.param(8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], id="even"),
        pytest.param(10, 4, [(0, 3), (3, 6), (6, 9), (9, 10)], id="shorter-last"),
        pytest.param(5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)], id="empty-last"),
        pytest.param(3, 4, [(0, 1), (1, 2), (2, 3), (3, 3)], id="fewer-elements-than-shards"),
        pytest.param(0, 2, [(0, 0), (0, 0)], id="nothing"),
        pytest.param(7, 1, [(0, 7)], id="one-shard"),
    ],
)
def test_shard_bounds_of_known_dims_are_those_of_chunk(
    size: int, num_shards: int, expected: list[tuple[int, int]]
) -> None:
    assert [shard_bounds(size, num_shards, i) for i in range(num_shards)] == expected


@given(st.integers(0, 200), st.integers(1, 40))
def test_shard_bounds_of_all_shards_tile_the_dim(size: int, num_shards: int) -> None:
    bounds = [shard_bounds(size, num_shards, index) for index in range(num_shards)]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(size))


@given(st.integers(0, 200), st.integers(1, 40))
def test_shard_bounds_have_the_lengths_that_chunk_gives(size: int, num_shards: int) -> None:
    bounds = [shard_bounds(size, num_shards, index) for index in range(num_shards)]
    assert [stop - start for start, stop in bounds] == chunk_lengths(size, num_shards)


@pytest.mark.parametrize("index", [-1, 4])
def test_shard_bounds_of_index_outside_the_axis_raise(index: int) -> None:
    with pytest.raises(MeshIndexError, match=rf"shard {index} was asked for, of 4"):
        shard_bounds(10, 4, index)


@pytest.mark.parametrize(("size", "num_shards"), [(-1, 2), (4, 0), (4, -2)])
def test_shard_bounds_of_impossible_cut_raise(size: int, num_shards: int) -> None:
    with pytest.raises(MeshError, match=f"cut {size} elements into {num_shards} shards"):
        shard_bounds(size, num_shards, 0)


@given(pairs_of_boxes)
def test_intersection_holds_the_elements_that_both_hold(pair: tuple[Box, Box]) -> None:
    one, other = pair
    found = one.intersect(other)
    assert (elements(found) if found else set()) == elements(one) & elements(other)


@given(pairs_of_boxes)
def test_intersection_in_either_order_is_the_same(pair: tuple[Box, Box]) -> None:
    assert pair[0].intersect(pair[1]) == pair[1].intersect(pair[0])


@given(pairs_of_boxes)
def test_relative_box_shifted_back_holds_the_same_elements(pair: tuple[Box, Box]) -> None:
    inner, outer = pair[0].intersect(pair[1]), pair[1]
    if inner is None:
        return
    moved = inner.relative_to(outer)
    shifted = {
        tuple(i + o for i, o in zip(element, outer.offsets, strict=True))
        for element in elements(moved)
    }
    assert shifted == elements(inner)


@given(st.integers(0, 3).flatmap(boxes))
def test_num_elements_counts_the_elements(box: Box) -> None:
    assert box.num_elements == len(elements(box))


def test_box_of_scalar_holds_one_element() -> None:
    box = Box((), ())
    assert (box.num_elements, box.intersect(box), box.slices()) == (1, box, ())


def test_relative_to_by_empty_box_gives_an_empty_box() -> None:
    assert Box((9,), (0,)).relative_to(Box((2,), (3,))).num_elements == 0


def test_relative_to_by_box_outside_raises() -> None:
    with pytest.raises(MeshError, match=r"doesn't lie inside Box\(offsets=\(2,\)"):
        Box((1,), (2,)).relative_to(Box((2,), (3,)))


@pytest.mark.parametrize("inner", [Box((0, 0), (0, 2)), Box((0, 0), (1, 1))])
def test_relative_to_box_of_other_ndim_raises(inner: Box) -> None:
    with pytest.raises(MeshError, match=r"doesn't lie inside|2 dims was intersected"):
        inner.relative_to(Box((0,), (4,)))


def test_intersection_of_boxes_of_different_ndim_raises() -> None:
    with pytest.raises(MeshError, match="a box of 1 dims was intersected with one of 2"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


@pytest.mark.parametrize(
    ("offsets", "sizes", "match"),
    [
        pytest.param((0,), (1, 2), r"1 offsets \(0,\) and 2 sizes", id="lengths-differ"),
        pytest.param((-1,), (1,), "at least 0", id="negative-offset"),
        pytest.param((0,), (-1,), "at least 0", id="negative-size"),
    ],
)
def test_box_of_numbers_that_do_not_fit_raises(
    offsets: tuple[int, ...], sizes: tuple[int, ...], match: str
) -> None:
    with pytest.raises(MeshError, match=match):
        Box(offsets, sizes)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0.5,), (1,)), ((0,), ("1",)), (0, 1), (None, (1,))],
    ids=["float", "text", "bare-ints", "none"],
)
def test_box_of_wrong_types_raises(offsets: object, sizes: object) -> None:
    with pytest.raises(MeshTypeError, match="Pass a tuple of ints each"):
        Box(offsets, sizes)  # type: ignore[arg-type]  # the point of the test


def test_box_of_lists_equals_and_hashes_as_that_of_tuples() -> None:
    made = Box([1, 2], [3, 4])  # type: ignore[arg-type]  # the point of the test
    assert len({made, Box((1, 2), (3, 4))}) == 1


def test_box_slices_cut_the_box_out_of_a_list() -> None:
    assert list(range(10))[Box((2,), (3,)).slices()[0]] == [2, 3, 4]
    assert Box((2, 1), (3, 0)).stops == (5, 1)
