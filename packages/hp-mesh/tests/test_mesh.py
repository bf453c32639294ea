"""Device meshes as values: this process's rank comes from the environment, nothing is connected."""

import copy
import itertools
import math
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_mesh import (
    DeviceMesh,
    MeshError,
    MeshKeyError,
    MeshStateError,
    MeshTypeError,
    as_device_mesh,
    init_device_mesh,
)

NAMES = ("a", "b", "c", "d")
MAX_RANKS = 10_000


@contextmanager
def process(rank: int) -> Iterator[None]:
    """Be this rank, with no framework loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.delitem(sys.modules, "torch", raising=False)
        patch.delitem(sys.modules, "mindspore", raising=False)
        yield


@pytest.fixture(autouse=True)
def _rank_zero() -> Iterator[None]:
    with process(0):
        yield


@dataclass(frozen=True)
class Grid:
    """A mesh written out: every coordinate and its rank."""

    shape: tuple[int, ...]
    rank: int

    @property
    def ranks(self) -> dict[tuple[int, ...], int]:
        return dict(zip(itertools.product(*map(range, self.shape)), itertools.count()))

    @property
    def coordinate(self) -> tuple[int, ...]:
        return next(point for point, rank in self.ranks.items() if rank == self.rank)

    def ranks_on(self, axes: list[int]) -> list[int]:
        """Ranks that differ from this process at most on these axes."""
        own, rest = self.coordinate, [i for i in range(len(self.shape)) if i not in axes]
        return [r for p, r in self.ranks.items() if all(p[i] == own[i] for i in rest)]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        shape.append(draw(st.integers(1, min(30, MAX_RANKS // math.prod(shape)))))
    return Grid(tuple(shape), draw(st.integers(0, math.prod(shape) - 1)))


def mesh_of(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", grid.shape, mesh_dim_names=NAMES[: len(grid.shape)])


@given(grids())
def test_coordinate_and_ranks_of_any_mesh_are_those_of_the_grid(grid: Grid) -> None:
    with process(grid.rank):
        mesh = mesh_of(grid)
        assert mesh.get_coordinate() == grid.coordinate
        assert mesh.ranks == tuple(range(math.prod(grid.shape)))


@given(grids(), st.data())
def test_slice_of_any_mesh_has_the_ranks_of_the_grid(grid: Grid, data: st.DataObject) -> None:
    axes = sorted(data.draw(st.sets(st.sampled_from(range(len(grid.shape))), min_size=1)))
    with process(grid.rank):
        part = mesh_of(grid)[tuple(NAMES[axis] for axis in axes)]
        assert list(part.ranks) == grid.ranks_on(axes)
        assert part.get_coordinate() == tuple(grid.coordinate[axis] for axis in axes)
        assert part.shape == tuple(grid.shape[axis] for axis in axes)


@given(grids(), st.data())
def test_slice_of_a_slice_equals_the_slice_of_the_root(grid: Grid, data: st.DataObject) -> None:
    names = NAMES[: len(grid.shape)]
    outer = tuple(sorted(data.draw(st.sets(st.sampled_from(names), min_size=1))))
    inner = tuple(sorted(data.draw(st.sets(st.sampled_from(outer), min_size=1))))
    with process(grid.rank):
        mesh = mesh_of(grid)
        assert mesh[outer][inner] == mesh[inner]


@given(grids(), st.data())
def test_ranks_along_any_axis_are_the_line_of_the_grid(grid: Grid, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(range(len(grid.shape))))
    with process(grid.rank):
        mesh = mesh_of(grid)
        assert list(mesh.ranks_along(NAMES[axis])) == grid.ranks_on([axis])
        assert mesh.get_local_rank(axis) == grid.coordinate[axis]


@given(grids(), st.data())
def test_flatten_of_neighbours_has_their_ranks_in_order(grid: Grid, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(grid.shape) - 1))
    axes = list(range(first, data.draw(st.integers(first, len(grid.shape) - 1)) + 1))
    with process(grid.rank):
        flat = mesh_of(grid)[tuple(NAMES[axis] for axis in axes)].flatten("flat")
        assert list(flat.ranks) == grid.ranks_on(axes)
        assert flat.ranks_along() == flat.ranks
        assert flat.ranks[flat.get_local_rank()] == grid.rank


@given(st.permutations(range(2, 14)), st.sampled_from([(12,), (3, 4), (2, 3, 2)]), st.data())
def test_mesh_of_any_ranks_keeps_their_order(
    ranks: list[int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, 11))
    nested = nest(ranks, shape)
    with process(ranks[place]):
        mesh = DeviceMesh("cpu", nested)
        assert mesh.ranks == tuple(ranks)
        assert mesh.get_coordinate() == list(itertools.product(*map(range, shape)))[place]


def nest(flat: list[int], shape: tuple[int, ...]) -> list[object]:
    if len(shape) == 1:
        return list(flat)
    step = len(flat) // shape[0]
    return [nest(flat[i : i + step], shape[1:]) for i in range(0, len(flat), step)]


# --- size ------------------------------------------------------------------------------------


class CountedRanks:
    """A million ranks that count how often one is looked up."""

    def __init__(self, size: int) -> None:
        self.ranks = range(size)
        self.num_lookups = 0

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, place: int) -> int:
        self.num_lookups += 1
        return self.ranks[place]

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def index(self, rank: int) -> int:
        return self.ranks.index(rank)


def test_line_of_a_million_ranks_looks_up_only_its_own_ranks() -> None:
    mesh = init_device_mesh("cpu", (100, 10, 1000), mesh_dim_names=("pp", "dp", "tp"))
    counted = CountedRanks(1_000_000)
    mesh._root_ranks = counted  # type: ignore[assignment]  # counts
    assert mesh["pp", "dp"]["dp"].ranks_along() == tuple(range(0, 10_000, 1000))
    assert counted.num_lookups == 10


def test_mesh_of_a_million_ranks_costs_less_than_a_mebibyte() -> None:
    tracemalloc.start()
    try:
        mesh = init_device_mesh("cpu", (100, 10, 1000), mesh_dim_names=("pp", "dp", "tp"))
        flat = mesh["dp", "tp"].flatten()
        assert (flat.get_local_rank(), flat.size()) == (0, 10_000)
        assert mesh.ranks_along("pp") == tuple(range(0, 1_000_000, 10_000))
        assert mesh == init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
        assert "ranks=[0, 1, 2" in repr(mesh)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20


# --- slicing and flattening by hand ------------------------------------------------------------


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def test_slice_of_all_axes_is_the_mesh_itself() -> None:
    mesh = cube()
    assert mesh["pp", "dp", "tp"] is mesh


@pytest.mark.parametrize("names", [("tp", "dp"), ("dp", "dp"), ()], ids=str)
def test_slice_out_of_order_repeated_or_empty_raises(names: tuple[str, ...]) -> None:
    with pytest.raises(MeshError, match=r"which has \('pp', 'dp', 'tp'\). Name each once"):
        cube()[names]


@pytest.mark.parametrize("names", ["cp", ("dp", "cp")], ids=str)
def test_slice_of_unknown_name_raises_key_error(names: str | tuple[str, ...]) -> None:
    with pytest.raises(MeshKeyError, match="axis 'cp' isn't in this mesh"):
        cube()[names]


@pytest.mark.parametrize("names", [0, ["dp"], ("dp", 1), None, slice(None)], ids=str)
def test_slice_by_something_else_than_names_raises(names: object) -> None:
    with pytest.raises(MeshTypeError, match="takes an axis name or a tuple of them"):
        cube()[names]  # type: ignore[index]  # the point of the test


def test_slice_of_mesh_without_names_raises() -> None:
    with pytest.raises(MeshStateError, match="needs axis names and this mesh has none"):
        DeviceMesh("cpu", [[0, 1]])["0"]


def test_flattened_axes_are_known_to_the_root_by_name() -> None:
    mesh = cube()
    flat = mesh["dp", "tp"].flatten()
    assert mesh["dp_tp"] is flat
    assert mesh["dp", "tp"].flatten() is flat
    assert flat.root_mesh is mesh


def test_flattened_axes_are_unknown_to_other_slices() -> None:
    mesh = cube()
    mesh["dp", "tp"].flatten()
    with pytest.raises(MeshKeyError, match="axis 'dp_tp' isn't in this mesh"):
        mesh["pp"]["dp_tp"]


def test_flatten_of_one_axis_under_its_own_name_is_that_mesh() -> None:
    part = cube()["tp"]
    assert part.flatten() is part


def test_flatten_to_the_name_of_an_axis_raises() -> None:
    with pytest.raises(MeshError, match=r"can't be flattened to 'pp': the root mesh has"):
        cube()["dp", "tp"].flatten("pp")


def test_flatten_to_a_name_that_other_axes_got_raises() -> None:
    mesh = cube()
    mesh["dp", "tp"].flatten("model")
    with pytest.raises(MeshError, match=r"\('pp', 'dp'\) can't be flattened to 'model'"):
        mesh["pp", "dp"].flatten("model")


def test_flatten_of_axes_that_are_no_neighbours_raises_and_registers_nothing() -> None:
    mesh = cube()
    with pytest.raises(MeshError, match="aren't evenly spaced"):
        mesh["pp", "tp"].flatten("odd")
    with pytest.raises(MeshKeyError, match="'odd'"):
        mesh["odd"]


@pytest.mark.parametrize(("name", "error"), [(3, MeshTypeError), ("", MeshError)])
def test_flatten_to_something_else_than_a_name_raises(name: object, error: type[MeshError]) -> None:
    with pytest.raises(error, match="names"):
        cube().flatten(name)  # type: ignore[arg-type]  # the point of the test


def test_flatten_of_mesh_without_names_joins_the_numbers() -> None:
    flat = DeviceMesh("cpu", [[0, 1], [2, 3]]).flatten()
    assert (flat.mesh_dim_names, flat.ranks) == (("0_1",), (0, 1, 2, 3))


# --- this process ------------------------------------------------------------------------------


def test_mesh_without_this_rank_has_no_coordinate() -> None:
    assert DeviceMesh("cpu", [4, 5]).get_coordinate() is None


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda mesh: mesh.get_local_rank("a"), id="local-rank"),
        pytest.param(lambda mesh: mesh.ranks_along("a"), id="ranks-along"),
        pytest.param(lambda mesh: mesh["a"], id="slice"),
        pytest.param(lambda mesh: mesh.flatten(), id="flatten"),
        pytest.param(lambda mesh: mesh.get_group("a"), id="group"),
    ],
)
def test_rank_outside_the_mesh_that_asks_for_its_place_raises(
    ask: Callable[[DeviceMesh], object],
) -> None:
    mesh = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("a", "b"))
    with pytest.raises(MeshStateError, match=r"rank 0 isn't in this mesh of ranks \[4, 5, 6, 7\]"):
        ask(mesh)


@pytest.mark.parametrize("value", [None, "", "two", "-1"])
def test_rank_of_process_without_launcher_raises(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("RANK")
    if value is not None:
        monkeypatch.setenv("RANK", value)
    with pytest.raises(MeshStateError, match=r"environment variable RANK is .* torchrun"):
        _ = DeviceMesh("cpu", [0]).rank


def test_local_rank_of_several_axes_without_naming_one_raises() -> None:
    with pytest.raises(MeshStateError, match=r"axes \('pp', 'dp', 'tp'\); say which one"):
        cube().get_local_rank()


# --- what meshes are made of -------------------------------------------------------------------


class Array:
    """An array of another library."""

    def __init__(self, values: object) -> None:
        self.values = values

    def tolist(self) -> object:
        return self.values


@pytest.mark.parametrize(
    "ranks",
    [[[0, 1], [2, 3]], ((0, 1), (2, 3)), [(0, 1), [2, 3]], Array([[0, 1], [2, 3]])],
    ids=["lists", "tuples", "mixed", "array"],
)
def test_mesh_of_nested_lists_tuples_or_arrays_is_the_same(ranks: object) -> None:
    assert DeviceMesh("cpu", ranks) == DeviceMesh("cpu", [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("ranks", "match"),
    [
        pytest.param([[0, 1], [2]], "differ in length or depth", id="ragged"),
        pytest.param([[0, 1], [2], [3, 4, 5]], "differ in length", id="ragged-with-right-total"),
        pytest.param([0, [1]], "differ in length or depth", id="rank-beside-list"),
        pytest.param([[0], 1], "differ in length or depth", id="list-beside-rank"),
        pytest.param([[0, 1], [2, [3]]], "differ in length or depth", id="too-deep"),
        pytest.param([0, 1, 0], "twice", id="rank-twice"),
        pytest.param([[0, -1]], "negative", id="negative"),
        pytest.param(range(-2, 2), "negative", id="negative-range"),
        pytest.param(range(3, -2, -1), "negative", id="negative-falling-range"),
        pytest.param([], "without ranks", id="empty"),
        pytest.param([[], []], "without ranks", id="empty-rows"),
        pytest.param(range(0), "without ranks", id="empty-range"),
    ],
)
def test_mesh_of_ranks_that_form_no_grid_raises(ranks: object, match: str) -> None:
    with pytest.raises(MeshError, match=match):
        DeviceMesh("cpu", ranks)


@pytest.mark.parametrize(
    "ranks", [3, "01", {0, 1}, Array(5), [0.0, 1.0], ["0"], [None], [True, False]], ids=str
)
def test_mesh_of_something_else_than_ranks_raises(ranks: object) -> None:
    with pytest.raises(MeshTypeError, match=r"a mesh is made of|isn't a rank"):
        DeviceMesh("cpu", ranks)


def test_error_on_a_big_mesh_names_few_ranks() -> None:
    with pytest.raises(MeshError, match=r"\[0, 1, 2, 3, 4, 5, 6, 7\] and 993 more") as caught:
        DeviceMesh("cpu", [*range(1000), 0])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("make", [DeviceMesh, init_device_mesh], ids=["class", "function"])
@pytest.mark.parametrize("device_type", ["gpu", "cuda:0", "", None, 3])
def test_mesh_on_unknown_device_type_raises(
    make: Callable[[object, object], DeviceMesh], device_type: object
) -> None:
    with pytest.raises(MeshError, match=r"isn't known. Pass one of \('cpu', 'cuda', 'npu'\)"):
        make(device_type, (1,))


@pytest.mark.parametrize("shape", [4, None, "4", {2, 3}, (2.0,), (True, 2)], ids=str)
def test_init_device_mesh_of_wrong_shape_type_raises(shape: object) -> None:
    with pytest.raises(MeshTypeError, match="shape"):
        init_device_mesh("cpu", shape)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("names", ["ab", ("a", 1), 5], ids=str)
def test_init_device_mesh_of_wrong_names_type_raises(names: object) -> None:
    with pytest.raises(MeshTypeError, match="axis names are a tuple of strings"):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names)  # type: ignore[arg-type]


def test_init_device_mesh_takes_a_list_as_shape() -> None:
    assert init_device_mesh("cpu", [2, 2]).shape == (2, 2)


@pytest.mark.parametrize("value", [3, "mesh", None, [[0, 1]]], ids=str)
def test_as_device_mesh_of_something_else_raises(value: object) -> None:
    with pytest.raises(MeshTypeError, match=f"a {type(value).__name__} was found"):
        as_device_mesh(value)


def test_as_device_mesh_of_ours_is_the_same_object() -> None:
    mesh = cube()
    assert as_device_mesh(mesh) is mesh


# --- values ------------------------------------------------------------------------------------


def test_meshes_of_equal_parts_are_equal_and_hash_alike() -> None:
    listed = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    counted = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert {listed, counted} == {counted}


def test_slice_equals_a_mesh_made_of_its_ranks() -> None:
    made = DeviceMesh("cpu", [0, 2], mesh_dim_names=("a",))
    assert {init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"], made} == {made}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(DeviceMesh("cuda", [[0, 1]], mesh_dim_names=("a", "b")), id="device"),
        pytest.param(DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "c")), id="names"),
        pytest.param(DeviceMesh("cpu", [[0, 1]]), id="no-names"),
        pytest.param(DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "b")), id="shape"),
        pytest.param(DeviceMesh("cpu", [[0, 2]], mesh_dim_names=("a", "b")), id="ranks"),
        pytest.param(((0, 1),), id="no-mesh"),
    ],
)
def test_mesh_differs_from_one_with_another_part(other: object) -> None:
    assert DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "b")) != other


def test_repr_names_axes_and_the_first_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 5), mesh_dim_names=("dp", "tp"))
    assert repr(mesh) == "DeviceMesh('cpu', dp=2, tp=5, ranks=[0, 1, 2, 3, 4, 5, 6, 7, ...])"


def test_deep_copy_of_a_mesh_is_the_mesh() -> None:
    mesh = cube()
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh


def test_pickled_mesh_comes_back_equal() -> None:
    part = cube()["dp", "tp"]
    assert pickle.loads(pickle.dumps(part)) == part
