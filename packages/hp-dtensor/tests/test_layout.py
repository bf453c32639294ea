"""Boxes of layouts, against cuts made on lists of indices.

The reference cuts each dim's list of indices as torch.chunk would, one mesh axis after the other.
"""

import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_dtensor import Layout, LayoutError, Placement, Replicate, Shard
from hp_mesh import AbstractMesh, Box, DeviceMesh, MeshError, MeshStateError


@dataclass(frozen=True)
class Case:
    """A layout on a tensor shape."""

    layout: Layout
    shape: tuple[int, ...]

    @property
    def positions(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.layout.mesh.shape)))

    @property
    def num_copies(self) -> int:
        placed = zip(self.layout.placements, self.layout.mesh.shape, strict=True)
        return math.prod(size for placement, size in placed if placement == Replicate())


def chunk(indices: list[int], num_shards: int, index: int) -> list[int]:
    length = math.ceil(len(indices) / num_shards)
    return indices[length * index :][:length]


def held(case: Case, position: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the elements at a mesh position, by cutting lists of indices."""
    dims = [list(range(size)) for size in case.shape]
    steps = zip(case.layout.placements, case.layout.mesh.shape, position, strict=True)
    for placement, num_ranks, index in steps:
        if isinstance(placement, Shard):
            dims[placement.dim] = chunk(dims[placement.dim], num_ranks, index)
    return set(itertools.product(*dims))


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


def placements(ndim: int) -> st.SearchStrategy[Placement]:
    replicate: st.SearchStrategy[Placement] = st.just(Replicate())
    return replicate | st.integers(-ndim, ndim - 1).map(Shard) if ndim else replicate


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    placed = draw(st.tuples(*[placements(len(shape)) for _ in mesh_shape]))
    return Case(Layout(AbstractMesh(mesh_shape, tuple("abc")[: len(mesh_shape)]), placed), shape)


@given(cases())
def test_boxes_cover_every_element_once_per_replica(case: Case) -> None:
    found = Counter(e for box in case.layout.boxes(case.shape) for e in elements(box))
    whole = itertools.product(*map(range, case.shape))
    assert found == Counter(dict.fromkeys(whole, case.num_copies))


@given(cases())
def test_box_of_any_position_holds_what_cutting_lists_gives(case: Case) -> None:
    boxes = case.layout.boxes(case.shape)
    expected = [held(case, position) for position in case.positions]
    assert [elements(box) for box in boxes] == expected


@given(cases())
def test_boxes_are_those_of_the_positions_in_row_major_order(case: Case) -> None:
    one_by_one = [case.layout.box(case.shape, position) for position in case.positions]
    assert list(case.layout.boxes(case.shape)) == one_by_one


@given(cases())
def test_box_that_holds_nothing_still_lies_inside_the_tensor(case: Case) -> None:
    stops = [box.stops for box in case.layout.boxes(case.shape)]
    assert all(s <= size for stop in stops for s, size in zip(stop, case.shape, strict=True))


@given(cases())
def test_normalized_placements_give_the_same_boxes(case: Case) -> None:
    counted = Layout(case.layout.mesh, case.layout.normalized(case.shape))
    assert counted.boxes(case.shape) == case.layout.boxes(case.shape)
    assert all(p.dim >= 0 for p in counted.placements if isinstance(p, Shard))


def mesh(*shape: int) -> AbstractMesh:
    return AbstractMesh(shape, tuple("abc")[: len(shape)])


@pytest.mark.parametrize(
    ("layout", "shape", "offsets_and_sizes"),
    [
        pytest.param(
            Layout(mesh(2, 2), (Shard(0), Shard(0))),
            (7,),
            [((0,), (2,)), ((2,), (2,)), ((4,), (2,)), ((6,), (1,))],
            id="nested-shards-of-one-dim",
        ),
        pytest.param(
            Layout(mesh(2, 3), (Shard(0), Shard(0))),
            (5,),
            [((0,), (1,)), ((1,), (1,)), ((2,), (1,)), ((3,), (1,)), ((4,), (1,)), ((5,), (0,))],
            id="nested-shards-with-empty-last",
        ),
        pytest.param(
            Layout(mesh(2), (Shard(-1),)),
            (2, 3),
            [((0, 0), (2, 2)), ((0, 2), (2, 1))],
            id="negative-dim",
        ),
        pytest.param(Layout(mesh(2), (Replicate(),)), (), [((), ())] * 2, id="scalar"),
        pytest.param(
            Layout(mesh(4), (Shard(0),)),
            (2, 3),
            [((0, 0), (1, 3)), ((1, 0), (1, 3)), ((2, 0), (0, 3)), ((2, 0), (0, 3))],
            id="fewer-rows-than-ranks",
        ),
    ],
)
def test_boxes_of_known_layouts(
    layout: Layout,
    shape: tuple[int, ...],
    offsets_and_sizes: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    assert [(box.offsets, box.sizes) for box in layout.boxes(shape)] == offsets_and_sizes


@pytest.mark.parametrize("dim", [2, -3, 9])
def test_shard_of_dim_outside_the_tensor_raises(dim: int) -> None:
    with pytest.raises(LayoutError, match=rf"Shard\(dim={dim}\) was asked for .* \(2, 3\)"):
        Layout(mesh(2), (Shard(dim),)).boxes((2, 3))


@pytest.mark.parametrize("dim", [0, -1])
def test_shard_of_scalar_raises_and_says_to_replicate(dim: int) -> None:
    with pytest.raises(LayoutError, match="a scalar has none: replicate it"):
        Layout(mesh(2), (Shard(dim),)).boxes(())


@pytest.mark.parametrize("placed", [(), (Shard(0),), (Shard(0),) * 3], ids=len)
def test_layout_of_wrong_number_of_placements_raises(placed: tuple[Placement, ...]) -> None:
    expected = rf"{len(placed)} placements .* a mesh of 2 axes \('a', 'b'\)"
    with pytest.raises(LayoutError, match=expected):
        Layout(mesh(2, 2), placed)


@pytest.mark.parametrize("placed", [("S(0)",), (0,), (None,), (Shard,), (Placement(),)], ids=str)
def test_layout_of_something_else_than_placements_raises(placed: object) -> None:
    with pytest.raises(LayoutError, match="isn't a placement"):
        Layout(mesh(2), placed)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("placed", [Shard(0), None, "S", 0], ids=str)
def test_layout_of_placements_that_are_no_tuple_raises(placed: object) -> None:
    with pytest.raises(LayoutError, match="Pass a tuple, one per mesh axis"):
        Layout(mesh(2), placed)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("value", [None, (2, 2), "mesh"], ids=str)
def test_layout_of_something_else_than_a_mesh_raises(value: object) -> None:
    with pytest.raises(LayoutError, match=f"found a {type(value).__name__}. Pass hp_mesh"):
        Layout(value, (Shard(0),))  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("coordinate", [(0,), (0, 0, 0), (2, 0), (0, 3), (-1, 0)], ids=str)
@pytest.mark.parametrize(
    "placed", [(Shard(0),) * 2, (Replicate(),) * 2], ids=["shard", "replicate"]
)
def test_box_at_coordinate_outside_the_mesh_raises(
    coordinate: tuple[int, ...], placed: tuple[Placement, ...]
) -> None:
    with pytest.raises(LayoutError, match=r"was given for a mesh of shape \(2, 3\)"):
        Layout(mesh(2, 3), placed).box((4, 4), coordinate)


def test_box_of_negative_size_raises() -> None:
    with pytest.raises(MeshError, match="-4"):
        Layout(mesh(2), (Replicate(),)).boxes((-4,))


def test_layout_of_list_equals_and_hashes_as_that_of_a_tuple() -> None:
    listed = Layout(mesh(2), [Shard(0)])  # type: ignore[arg-type]  # the point of the test
    assert {listed, Layout(mesh(2), (Shard(0),))} == {listed}


@pytest.fixture
def _is_rank_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.usefixtures("_is_rank_two")
def test_local_box_is_that_of_this_process() -> None:
    layout = Layout(DeviceMesh("cpu", [[3, 1], [0, 2]]), (Shard(1), Replicate()))
    assert layout.local_box((2, 5)) == Box((0, 3), (2, 2))


def test_local_box_on_abstract_mesh_raises() -> None:
    with pytest.raises(MeshStateError, match=r"no position in AbstractMesh\(.*Ask for box"):
        Layout(mesh(2), (Shard(0),)).local_box((4,))


@pytest.mark.usefixtures("_is_rank_two")
def test_local_box_of_process_outside_the_mesh_raises() -> None:
    with pytest.raises(MeshStateError, match=r"no position in DeviceMesh\(.*Ask for box"):
        Layout(DeviceMesh("cpu", [0, 1]), (Shard(0),)).local_box((4,))
