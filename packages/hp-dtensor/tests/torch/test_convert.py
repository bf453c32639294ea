"""DTensors made from our layouts, on real ranks; the original tensor is the reference."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hp_comm.testing import run_ranks
from hp_dtensor import (
    Layout,
    LayoutError,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    box_of,
    distribute_tensor,
    dtensor_from_local,
    from_torch_placement,
    is_dtensor,
    layout_of,
    local_of,
    to_torch_placement,
)
from hp_mesh import DeviceMesh, MeshStateError, init_device_mesh

SHAPES = [(8, 4), (5, 3), (2, 7), (1, 1), (0, 3), (4,), (3, 2, 5)]


def original(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def rebuild_everywhere(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> int:
    mesh, num_cases = init_device_mesh("cpu", mesh_shape), 0
    for shape in SHAPES:
        choices: list[Placement] = [
            Replicate(),
            *(Shard(d) for d in range(-len(shape), len(shape))),
        ]
        for placed in itertools.product(choices, repeat=len(mesh_shape)):
            full = original(shape)
            part = full[Layout(mesh, placed).local_box(shape).slices()].clone()
            made = dtensor_from_local(part, mesh, placed, shape=shape)
            assert made.shape == full.shape
            assert made.stride() == full.stride()
            assert torch.equal(made.full_tensor(), full), (shape, placed)
            assert torch.equal(distribute_tensor(full, mesh, placed).full_tensor(), full)
            num_cases += 1
    return num_cases


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_full_tensor_of_any_cut_is_the_original(mesh_shape: tuple[int, ...]) -> None:
    found = run_ranks(rebuild_everywhere, torch.Size(mesh_shape).numel(), mesh_shape)
    assert min(found) >= 30


def compare_with_torch(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    theirs = init_torch_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    choices = [torch_tensor.Replicate(), torch_tensor.Shard(0), torch_tensor.Shard(1)]
    for shape, placed in itertools.product([(5, 3), (7, 2)], itertools.product(choices, repeat=2)):
        expected = torch_tensor.distribute_tensor(original(shape), theirs, placed)
        ours = distribute_tensor(original(shape), mesh, placed)
        assert torch.equal(local_of(ours), expected.to_local()), (shape, placed)
        assert ours.placements == expected.placements


def test_pieces_are_those_that_torch_cuts() -> None:
    run_ranks(compare_with_torch, 4)


def rebuild_on_falling_ranks(rank: int, world_size: int) -> None:
    for ranks in ([1, 0], [[1], [0]]):
        mesh = DeviceMesh("cpu", ranks)
        placed = (Shard(0), Replicate())[: mesh.ndim]
        made = distribute_tensor(original((5, 3)), mesh, placed)
        assert box_of(made).offsets == ((0, 0) if rank == 1 else (3, 0))
        assert torch.equal(made.full_tensor(), original((5, 3)))


def test_full_tensor_on_ranks_in_falling_order_is_the_original() -> None:
    run_ranks(rebuild_on_falling_ranks, 2)


def look_back(rank: int, world_size: int) -> None:
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    unnamed = init_device_mesh("cpu", (2, 2))
    for mesh in (named, unnamed):
        made = distribute_tensor(original((5, 3)), mesh, (Shard(-1), Replicate()))
        assert layout_of(made) == Layout(mesh, (Shard(1), Replicate()))
        assert local_of(made).shape == box_of(made).sizes
    part = distribute_tensor(original((5, 3)), named["b"], (Shard(0),))
    assert layout_of(part) == Layout(named["b"], (Shard(0),))
    theirs = init_torch_mesh("cpu", (4,))
    found = layout_of(torch_tensor.distribute_tensor(original((5, 3)), theirs))
    assert found.mesh.to_torch() is theirs
    assert found.placements == (Replicate(),)


def test_layout_of_dtensor_is_the_one_it_was_made_with() -> None:
    run_ranks(look_back, 4)


def ask_for_other_placements(rank: int, world_size: int) -> list[str]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    local = torch.ones(2, 2)
    strided = torch_tensor.placement_types._StridedShard(0, split_factor=2)
    for placement in (torch_tensor.Partial(), torch_tensor.Partial("max"), strided):
        with pytest.raises(PlacementError, match="has no counterpart") as caught:
            dtensor_from_local(local, mesh, (placement,), shape=(4, 2))
        found.append(str(caught.value))
    partial = DTensor.from_local(local, mesh.to_torch(), [torch_tensor.Partial()])
    for ask in (layout_of, box_of):
        with pytest.raises(PlacementError, match=r"Partial.* has no counterpart"):
            ask(partial)
    assert torch.equal(local_of(partial), local)
    return found


def test_placements_of_torch_without_counterpart_are_named() -> None:
    found = run_ranks(ask_for_other_placements, 2)[0]
    words = ["Partial(sum)", "Partial(max)", "_StridedShard(dim=0, sf=2)"]
    assert [word for word, text in zip(words, found, strict=True) if word in text] == words


def pass_wrong_pieces(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    right = (3, 4) if rank == 0 else (2, 4)
    wrong = rf"has the shape \(9, 4\); .*gives it \({right[0]}, 4\) of a tensor of shape \(5, 4\)"
    with pytest.raises(LayoutError, match=wrong):
        dtensor_from_local(torch.ones(9, 4), mesh, (Shard(0),), shape=(5, 4))
    with pytest.raises(LayoutError, match=r"strides \(4,\) were given"):
        dtensor_from_local(torch.ones(right), mesh, (Shard(0),), shape=(5, 4), stride=(4,))
    made = dtensor_from_local(torch.ones(right), mesh, (Shard(0),), shape=(5, 4))
    with pytest.raises(LayoutError, match=r"a DTensor was found, placed \(Shard\(dim=0\),\)"):
        dtensor_from_local(made, mesh, (Shard(0),), shape=(5, 4))
    with pytest.raises(LayoutError, match=r"a DTensor was found"):
        distribute_tensor(made, mesh, (Shard(0),))
    for placed, match in [
        ((Shard(2),), r"Shard\(dim=2\) was asked for"),
        ((Shard(0), Shard(1)), "2 placements"),
        (("S(0)",), r"'S\(0\)' isn't a placement"),
        (([0],), r"\[0\] isn't a placement"),
    ]:
        with pytest.raises(LayoutError, match=match):
            dtensor_from_local(torch.ones(right), mesh, placed, shape=(5, 4))
        with pytest.raises(LayoutError, match=match):
            distribute_tensor(torch.ones(5, 4), mesh, placed)


def test_piece_or_placements_that_do_not_fit_raise() -> None:
    run_ranks(pass_wrong_pieces, 2)


def use_as_parameter(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    made = distribute_tensor(original((5, 3)).requires_grad_(), mesh, (Shard(0),))
    assert made.requires_grad
    assert made.is_leaf
    assert not distribute_tensor(original((5, 3)), mesh, (Shard(0),)).requires_grad
    assert not distribute_tensor(torch.arange(5), mesh, (Shard(0),)).requires_grad
    parameter = nn.Parameter(made)
    assert isinstance(parameter, nn.Parameter)
    assert is_dtensor(parameter)
    assert not is_dtensor(local_of(parameter))
    for changed in (parameter.detach(), parameter.data, parameter.to(torch.float64)):
        assert layout_of(changed) == layout_of(made)
        assert torch.equal(changed.full_tensor().float(), original((5, 3)))
    assert parameter.detach().requires_grad is False
    assert local_of(parameter).data_ptr() == local_of(made).data_ptr()
    (parameter * parameter).sum().backward()
    assert layout_of(parameter.grad) == layout_of(made)
    torch.testing.assert_close(parameter.grad.full_tensor(), 2 * original((5, 3)))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_distributed_tensor_works_as_a_parameter(world_size: int) -> None:
    run_ranks(use_as_parameter, world_size)


def share_memory(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.zeros(2, 3)
    made = dtensor_from_local(local, mesh, (Shard(0),), shape=(4, 3))
    local.fill_(3)
    assert torch.equal(local_of(made), torch.full((2, 3), 3.0))
    assert not local_of(made).requires_grad
    full = torch.zeros(4, 3)
    cut = distribute_tensor(full, mesh, (Shard(1),))
    full.fill_(3)
    assert torch.equal(local_of(cut), torch.zeros(local_of(cut).shape))
    assert local_of(cut).is_contiguous()


def test_local_piece_is_the_memory_given_and_a_cut_is_a_copy() -> None:
    run_ranks(share_memory, 2)


def differentiate(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2, 3), 2.0, requires_grad=True)
    dtensor_from_local(local, mesh, (Shard(0),), shape=(4, 3)).pow(2).sum().backward()
    assert torch.equal(local.grad, torch.full((2, 3), 4.0))


def test_gradient_flows_back_to_the_local_piece() -> None:
    run_ranks(differentiate, 2)


def repeat_with_changes(rank: int, world_size: int) -> None:
    """Plans are kept: they must not be mixed up by shape, placement or mesh."""
    mesh, other = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1, 0])
    for _ in range(2):
        for shape, placement, on in itertools.product(
            [(5, 3), (3, 5), (5,)], [Shard(0), Shard(-1), Replicate()], [mesh, other]
        ):
            made = distribute_tensor(original(shape), on, (placement,))
            assert torch.equal(made.full_tensor(), original(shape))
            assert layout_of(made).mesh == on
    column_major = dtensor_from_local(
        torch.ones(3, 2).t(), mesh, (Shard(0),), shape=(4, 3), stride=(1, 4)
    )
    assert column_major.stride() == (1, 4)
    assert dtensor_from_local(torch.ones(2, 3), mesh, (Shard(0),), shape=(4, 3)).stride() == (3, 1)


def test_calls_that_differ_in_one_part_are_not_mixed_up() -> None:
    run_ranks(repeat_with_changes, 2)


def stay_outside(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", [0])
    if rank == 1:
        with pytest.raises(MeshStateError, match="this process has no position in"):
            distribute_tensor(torch.ones(4), mesh, (Shard(0),))
        with pytest.raises(MeshStateError, match="rank 1 isn't in this mesh"):
            dtensor_from_local(torch.ones(4), mesh, (Shard(0),), shape=(4,))
    else:
        assert local_of(distribute_tensor(torch.ones(4), mesh, (Shard(0),))).shape == (4,)


def test_rank_outside_the_mesh_cannot_make_a_dtensor_on_it() -> None:
    run_ranks(stay_outside, 2)


def count_messages(rank: int, world_size: int) -> int:
    mesh = init_device_mesh("cpu", (2,))
    mesh.to_torch()
    with CommDebugMode() as mode:
        distribute_tensor(original((5, 3)), mesh, (Shard(0),))
        dtensor_from_local(torch.ones(3, 3), mesh, (Replicate(),), shape=(3, 3))
    return mode.get_total_counts()


def test_making_dtensors_communicates_nothing() -> None:
    assert run_ranks(count_messages, 2) == [0, 0]


@pytest.mark.parametrize("placement", [Shard(0), Shard(-2), Replicate()], ids=str)
def test_placement_given_to_torch_comes_back_equal(placement: Placement) -> None:
    assert from_torch_placement(to_torch_placement(placement)) == placement


@pytest.mark.parametrize("value", ["S(0)", None, 0, torch_tensor.Shard(0), Placement()], ids=str)
def test_to_torch_placement_of_something_else_than_ours_raises(value: object) -> None:
    with pytest.raises(LayoutError, match="isn't a placement"):
        to_torch_placement(value)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("value", ["S(0)", None, Shard(0)], ids=str)
def test_from_torch_placement_of_something_else_is_none(value: object) -> None:
    assert from_torch_placement(value) is None


@pytest.mark.parametrize("ask", [layout_of, local_of, box_of])
def test_question_about_plain_tensor_says_what_to_do(ask: Callable[[object], object]) -> None:
    with pytest.raises(LayoutError, match=r"a Tensor was found\. Make one with distribute_tensor"):
        ask(torch.ones(2))
