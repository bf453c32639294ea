"""Process groups of meshes on real ranks."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hp_comm.testing import RankError, run_ranks
from hp_mesh import DeviceMesh, MeshStateError, init_device_mesh

NUM_ROUNDS = 5


def members(group: object) -> list[int]:
    """Ask the group's members for their ranks, in the order of the group."""
    found = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([dist.get_rank()]), group=group)
    return [int(one) for one in found]


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make_then_gather(rank: int, world_size: int) -> list[list[int]]:
    mesh = grid()
    names = ("dp", "tp") if rank % 2 else ("tp", "dp")
    groups = {name: mesh[name].get_group() for name in names}
    return [members(groups["dp"]), members(groups["tp"])]


def test_groups_asked_for_in_different_order_connect_the_lines_of_the_mesh() -> None:
    lines = [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
    assert run_ranks(make_then_gather, 4) == lines


def gather_flattened(rank: int, world_size: int) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flats = {"ab": mesh["a", "b"].flatten("ab"), "bc": mesh["b", "c"].flatten("bc")}
    order = ("ab", "bc") if rank in {0, 1, 4, 5} else ("bc", "ab")  # each group has both kinds
    groups = {name: flats[name].get_group() for name in order}
    return [members(groups["ab"]), members(groups["bc"])]


def test_flattened_groups_asked_for_in_different_order_connect_their_ranks() -> None:
    found = run_ranks(gather_flattened, 8)
    columns, halves = [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found == [[columns[rank % 2], halves[rank // 4]] for rank in range(8)]


def reuse(rank: int, world_size: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (world_size,))
    square = grid()
    return [
        mesh.get_group() is dist.group.WORLD,
        DeviceMesh("cpu").get_group() is dist.group.WORLD,
        square.flatten().get_group() is dist.group.WORLD,
        square.get_group("tp") is grid()["tp"].get_group(),
    ]


def test_mesh_over_all_ranks_and_equal_meshes_share_groups() -> None:
    assert run_ranks(reuse, 4) == [[True] * 4] * 4


def gather_axes_of_size_one(rank: int, world_size: int) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (1, 2, 1))
    return [members(mesh.get_group(axis)) for axis in range(3)]


def test_groups_along_axes_of_size_one_have_one_member() -> None:
    assert run_ranks(gather_axes_of_size_one, 2) == [[[0], [0, 1], [0]], [[1], [0, 1], [1]]]


def gather_falling(rank: int, world_size: int) -> tuple[list[int], int, list[int]]:
    mesh = DeviceMesh("cpu", [2, 0, 1])
    group = mesh.get_group()
    return members(group), dist.get_rank(group), [mesh.get_local_rank()]


def test_group_of_mesh_in_another_order_numbers_its_members_as_the_mesh_does() -> None:
    expected = [([2, 0, 1], 1, [1]), ([2, 0, 1], 2, [2]), ([2, 0, 1], 0, [0])]
    assert run_ranks(gather_falling, 3) == expected


def gather_part(rank: int, world_size: int) -> list[int] | str:
    mesh = DeviceMesh("cpu", [0, 2])
    if rank != 1:
        return members(mesh.get_group())
    with pytest.raises(MeshStateError, match="rank 1 isn't in this mesh") as caught:
        mesh.get_group()
    return str(caught.value)


def test_group_of_some_ranks_needs_nothing_of_the_others() -> None:
    found = run_ranks(gather_part, 3)
    assert (found[0], found[2]) == ([0, 2], [0, 2])


def own_store(rank: int, world_size: int) -> TCPStore:
    """Return a store that outlives the default process group, unlike that group's own."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    port = torch.tensor([store.port if rank == 0 else 0])
    dist.broadcast(port, 0)
    return store if rank == 0 else TCPStore("127.0.0.1", int(port), world_size, is_master=False)


def start_again(rank: int, world_size: int) -> list[list[int]]:
    """Destroy and initialise; the mesh is kept, the second half of the time ranks are swapped."""
    mesh, found = grid(), []
    store = own_store(rank, world_size)
    stale = [mesh.get_group("dp"), mesh.to_torch()]
    for number in range(NUM_ROUNDS):
        dist.barrier()
        dist.destroy_process_group()
        new = (rank + number) % world_size
        prefix = dist.PrefixStore(f"round-{number}", store)
        dist.init_process_group("gloo", store=prefix, rank=new, world_size=world_size)
        assert mesh.get_group("dp") is not stale[0]
        assert mesh.to_torch() is not stale[1]
        assert mesh.get_coordinate() == (new // 2, new % 2)
        lines = [members(mesh.get_group("dp")), members(mesh.to_torch().get_group("tp"))]
        assert lines == [[new % 2, new % 2 + 2], [new // 2 * 2, new // 2 * 2 + 1]]
        found.append([new, *lines[0]])
        stale = [mesh.get_group("dp"), mesh.to_torch()]
    dist.barrier()
    return found


def test_groups_after_destroy_and_init_are_new_ones() -> None:
    found = run_ranks(start_again, 4)
    assert [len(one) for one in found] == [NUM_ROUNDS] * 4


def ask_for_ranks_that_do_not_exist(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 9]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshStateError, match="the job has the ranks 0 to 1, not 9"):
        mesh.get_group("tp")
    with pytest.raises(MeshStateError, match=r"shape \(3,\) has 3 ranks and the job has 2"):
        init_device_mesh("cpu", (3,))


def test_mesh_that_does_not_fit_the_job_raises_on_every_rank() -> None:
    run_ranks(ask_for_ranks_that_do_not_exist, 2)


def start_from_environment(rank: int, world_size: int, make: str) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = torch.tensor([free.getsockname()[1]])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(port))
    mesh = init_device_mesh("cpu", (2,)) if make == "function" else DeviceMesh("cpu")
    assert dist.get_backend() == "gloo"
    found = members(mesh.get_group())
    dist.barrier()
    return found


@pytest.mark.parametrize("make", ["function", "class"])
def test_mesh_without_process_group_makes_it_from_torchruns_environment(make: str) -> None:
    assert run_ranks(start_from_environment, 2, make) == [[0, 1], [0, 1]]


def start_from_nothing(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
    for name in ("MASTER_PORT", "WORLD_SIZE"):
        del os.environ[name]
    for make in (lambda: init_device_mesh("cpu", (2,)), lambda: DeviceMesh("cpu")):
        with pytest.raises(MeshStateError, match=r"\['WORLD_SIZE', 'MASTER_PORT'\] aren't in"):
            make()
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(MeshStateError, match=r"Call torch\.distributed\.init_process_group"):
        mesh.get_group()
    with pytest.raises(MeshStateError, match=r"Call torch\.distributed\.init_process_group"):
        mesh.to_torch()


def test_mesh_without_process_group_and_launcher_says_what_is_missing() -> None:
    run_ranks(start_from_nothing, 1)


def fail(rank: int, world_size: int) -> None:
    raise MeshStateError("on purpose")


def test_failure_of_a_rank_fails_the_test() -> None:
    with pytest.raises(RankError, match="on purpose"):
        run_ranks(fail, 1)
