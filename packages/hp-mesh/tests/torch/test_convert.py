"""Our meshes and torch's, on real ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

from hp_comm.testing import run_ranks
from hp_mesh import DeviceMesh, as_device_mesh, init_device_mesh
from hp_mesh._framework import framework_of
from hp_mesh._torch.convert import MAX_KNOWN

NAMES = ("a", "b", "c")


def ours(shape: tuple[int, ...], named: bool) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)] if named else None)


def there_and_back(rank: int, world_size: int, shape: tuple[int, ...], named: bool) -> None:
    mesh = ours(shape, named)
    theirs = mesh.to_torch()
    assert isinstance(theirs, TorchMesh)
    assert theirs is mesh.to_torch()
    assert (tuple(theirs.shape), theirs.mesh.flatten().tolist()) == (shape, list(mesh.ranks))
    assert theirs.get_coordinate() == mesh.get_coordinate()
    assert as_device_mesh(theirs) == mesh
    assert as_device_mesh(theirs).to_torch() is theirs
    for axis in range(mesh.ndim):
        assert theirs.get_group(axis) is mesh.get_group(axis)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2), (1, 4)], ids=str)
def test_mesh_given_to_torch_and_back_is_equal(shape: tuple[int, ...], named: bool) -> None:
    run_ranks(there_and_back, 4, shape, named)


def slice_then_convert(rank: int, world_size: int) -> None:
    mesh = ours((2, 1, 2), named=True)
    for key in ("a", "b", "c", ("a", "c"), ("b", "c")):
        part = mesh[key]
        theirs = part.to_torch()
        assert theirs == mesh.to_torch()[key]
        assert as_device_mesh(theirs) == part
        for axis in part.axis_names:
            assert theirs.get_group(axis) is mesh.get_group(axis)


def test_slices_given_to_torch_are_slices_of_the_torch_mesh() -> None:
    run_ranks(slice_then_convert, 4)


def flatten_then_convert(rank: int, world_size: int) -> list[int]:
    flat = ours((2, 2), named=True).flatten("all")
    theirs = flat.to_torch()
    assert theirs.mesh_dim_names == ("all",)
    assert as_device_mesh(theirs) == flat
    total = torch.tensor([rank])
    dist.all_reduce(total, group=theirs.get_group())
    return [int(total)]


def test_flattened_mesh_given_to_torch_has_a_working_group() -> None:
    assert run_ranks(flatten_then_convert, 4) == [[6]] * 4


def convert_from_torch(rank: int, world_size: int, names: tuple[str, ...] | None) -> None:
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=names)
    mesh = DeviceMesh.from_torch(theirs)
    assert (mesh.shape, mesh.mesh_dim_names, mesh.ranks) == ((2, 2), names, (0, 1, 2, 3))
    assert mesh.to_torch() is theirs
    assert as_device_mesh(theirs) is mesh
    assert [mesh.get_group(axis) for axis in range(2)] == theirs.get_all_groups()


@pytest.mark.parametrize("names", [("a", "b"), None], ids=["named", "unnamed"])
def test_torch_mesh_as_ours_keeps_its_groups_and_comes_back_itself(
    names: tuple[str, ...] | None,
) -> None:
    run_ranks(convert_from_torch, 4, names)


def slice_torch_mesh(rank: int, world_size: int) -> None:
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    mesh = as_device_mesh(theirs)
    num_groups = len(dist.distributed_c10d._world.pg_map)
    assert mesh["b"].get_group() is theirs["b"].get_group()
    assert mesh["b"].to_torch() == theirs["b"]
    assert as_device_mesh(theirs["a"]) == mesh["a"]
    assert as_device_mesh(theirs["a"]).get_group() is theirs.get_group("a")
    assert len(dist.distributed_c10d._world.pg_map) == num_groups
    assert mesh.flatten().get_group() is dist.group.WORLD


def test_slices_of_a_torch_mesh_use_its_groups() -> None:
    run_ranks(slice_torch_mesh, 4)


def tell_equal_meshes_apart(rank: int, world_size: int) -> None:
    one, other = TorchMesh("cpu", [0, 1]), TorchMesh("cpu", [0, 1])
    assert one == other
    assert as_device_mesh(one).to_torch() is one
    assert as_device_mesh(other).to_torch() is other


def test_equal_torch_meshes_stay_two_objects() -> None:
    run_ranks(tell_equal_meshes_apart, 2)


def convert_many(rank: int, world_size: int) -> None:
    kept = TorchMesh("cpu", [0], mesh_dim_names=("kept",))
    for number in range(2 * MAX_KNOWN + 1):
        theirs = TorchMesh("cpu", [0], mesh_dim_names=(f"axis{number}",))
        assert as_device_mesh(theirs).mesh_dim_names == (f"axis{number}",)
        del theirs  # its identity may be given to the next one
    assert as_device_mesh(kept).to_torch() is kept


def test_many_torch_meshes_one_after_the_other_are_never_mistaken() -> None:
    run_ranks(convert_many, 1)


def copy_and_pickle(rank: int, world_size: int) -> None:
    mesh = ours((2,), named=True)
    theirs = mesh.to_torch()
    assert copy.deepcopy(mesh).to_torch() is theirs
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert b"hp_mesh" not in pickle.dumps(theirs)
    assert framework_of(theirs) == "torch"


def test_mesh_is_pickled_without_groups_and_leaves_nothing_in_torchs() -> None:
    run_ranks(copy_and_pickle, 2)


@pytest.mark.parametrize("ranks", [torch.tensor([[0, 1], [2, 3]]), torch.arange(4).view(2, 2)])
def test_mesh_of_a_tensor_of_ranks_is_that_of_lists(ranks: torch.Tensor) -> None:
    assert DeviceMesh("cpu", ranks) == DeviceMesh("cpu", [[0, 1], [2, 3]])
