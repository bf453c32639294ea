"""Meshes without ranks."""

import pytest

from hp_mesh import AbstractMesh, MeshError, MeshKeyError, MeshTypeError


class Whole:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


MESH = AbstractMesh((2, 3, 4), ("pp", "dp", "tp"))


def test_size_is_the_product_or_that_of_one_axis() -> None:
    assert [MESH.size(axis) for axis in (None, "dp", 2, -3)] == [24, 3, 4, 2]


@pytest.mark.parametrize("axis", ["cp", 3, -4, 1.0, None, ("pp",)])
def test_axis_index_of_unknown_axis_names_those_that_exist(axis: object) -> None:
    with pytest.raises(MeshKeyError, match=r"isn't in this mesh: it has \('pp', 'dp', 'tp'\)"):
        MESH.axis_index(axis)  # type: ignore[arg-type]  # the point of the test


def test_key_error_shows_its_message_without_quotes() -> None:
    with pytest.raises(KeyError) as caught:
        MESH.axis_index("cp")
    assert str(caught.value).startswith("axis 'cp' isn't")


def test_equal_meshes_hash_alike_and_lists_count_as_tuples() -> None:
    listed = AbstractMesh([2, 3, 4], ["pp", "dp", "tp"])  # type: ignore[arg-type]
    assert {listed, MESH} == {MESH}


def test_integers_of_other_libraries_become_ints() -> None:
    mesh = AbstractMesh((Whole(2),), ("dp",))  # type: ignore[arg-type]
    assert type(mesh.shape[0]) is int


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param((), (), id="no-axis"),
        pytest.param((2, 0), ("a", "b"), id="size-zero"),
        pytest.param((-1,), ("a",), id="size-negative"),
        pytest.param((2, 2), ("a",), id="too-few-names"),
        pytest.param((2, 2), ("a", "a"), id="name-twice"),
        pytest.param((2,), ("",), id="empty-name"),
    ],
)
def test_mesh_whose_sizes_or_names_do_not_fit_raises(
    shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    with pytest.raises(MeshError, match="a mesh"):
        AbstractMesh(shape, names)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        pytest.param(4, ("a",), id="bare-size"),
        pytest.param("22", ("a", "b"), id="text-shape"),
        pytest.param((2.0,), ("a",), id="float-size"),
        pytest.param((True,), ("a",), id="bool-size"),
        pytest.param((2,), None, id="no-names"),
        pytest.param((2,), "a", id="text-names"),
        pytest.param((2,), (3,), id="number-as-name"),
        pytest.param((2,), 5, id="bare-number-as-names"),
    ],
)
def test_mesh_of_wrong_types_raises(shape: object, names: object) -> None:
    with pytest.raises(MeshTypeError, match=r"a mesh|axis names"):
        AbstractMesh(shape, names)  # type: ignore[arg-type]  # the point of the test
