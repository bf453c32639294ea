"""Units over shared memory with torch tensors, on real processes."""

import ctypes

import pytest
import torch

import hp_comm
from hp_comm._shm import kernel
from hp_comm.plan import UnitPlan
from hp_comm.testing import run_ranks
from hp_comm.testing.units import chunked_plan

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)


def plan(num_ranks: int, shape: tuple[int, ...], dim: int = 0, dtype: str = "float32") -> UnitPlan:
    return chunked_plan(num_ranks, [(shape, dim)], compute_dtype=dtype)


def open_on_world(made: UnitPlan):
    communicator = hp_comm.communicator(transport="shm")
    return communicator, communicator.open_unit(made, label="layers.0")


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mix_precision(rank, world_size):
    made = plan(world_size, (7, 5), 1, "bfloat16")
    _communicator, unit = open_on_world(made)
    own = made.params[0].boxes[rank].slices()
    unit.gather([numbers((7, 5), 0)[own]])
    (full,) = unit.wait_gather()
    is_right = full.dtype == torch.bfloat16 and torch.equal(full, numbers((7, 5), 0).bfloat16())
    unit.free()
    grads = [numbers((7, 5), 1 + other).bfloat16() for other in range(world_size)]
    unit.reduce([grads[rank]], 1.0)
    (total,) = unit.wait_reduce()
    expected = torch.zeros(7, 5)
    for grad in grads:
        expected = expected + grad.float()
    return is_right and total.dtype == torch.float32 and torch.equal(total, expected[own])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unit_computes_in_bfloat16_and_adds_in_float32(world_size):
    assert run_ranks(mix_precision, world_size) == [True] * world_size


def edit_data(full):
    full.data.mul_(3)


def edit_numpy(full):
    full.numpy()[:] = 9


def edit_by_address(full):
    """Do what an extension does: write to the memory itself."""
    ctypes.memset(full.data_ptr() + 4 * 5000, 0xFF, 4 * 100)


EDITS = {"data": edit_data, "numpy": edit_numpy, "address": edit_by_address}


def edit(rank, world_size, name):
    communicator, unit = open_on_world(plan(world_size, (600, 16)))
    rows = unit.plan.params[0].boxes[rank].sizes[0]
    unit.gather([torch.ones(rows, 16)])
    (full,) = unit.wait_gather()
    version = full._version
    if rank == 0:
        EDITS[name](full)
    communicator.barrier()
    is_private = torch.equal(full, torch.ones(600, 16)) == (rank != 0)
    is_unnoticed = full._version == version
    unit.free()
    unit.gather([torch.full((rows, 16), 2.0)])
    (again,) = unit.wait_gather()
    is_gone = again is full and torch.equal(full, torch.full((600, 16), 2.0))
    return is_private, is_unnoticed, is_gone


@pytest.mark.parametrize("name", EDITS)
def test_edit_of_a_full_parameter_is_private_and_gone_after_the_next_gather(name):
    assert run_ranks(edit, 2, name) == [(True, True, True)] * 2


def differentiate(rank, world_size):
    """Save a full parameter for backward, free it, gather it again, go backward."""
    _communicator, unit = open_on_world(plan(world_size, (4, 3)))
    rows = unit.plan.params[0].boxes[rank].slices()
    weight = numbers((4, 3), 0)
    unit.gather([weight[rows]])
    (full,) = unit.wait_gather()
    x = numbers((2, 3), 1).requires_grad_()
    parameter = torch.nn.Parameter(full)
    loss = (x @ parameter.t()).square().sum()
    unit.free()
    unit.gather([weight[rows]])
    unit.wait_gather()
    loss.backward()
    expected = 2 * (x.detach() @ weight.t()) @ weight
    unit.reduce([parameter.grad], 0.5)
    (grad,) = unit.wait_reduce()
    by_hand = 2 * (x.detach() @ weight.t()).t() @ x.detach() * world_size * 0.5
    return torch.allclose(x.grad, expected), torch.allclose(grad, by_hand[rows])


def test_saved_full_parameter_is_right_in_backward_after_free_and_gather():
    assert run_ranks(differentiate, 2) == [(True, True)] * 2


def reduce_in_bfloat16(rank, world_size):
    communicator = hp_comm.communicator()
    array = numbers((100_000,), rank).bfloat16()
    communicator.all_reduce(array)
    expected = numbers((100_000,), 0).bfloat16()
    for other in range(1, world_size):
        expected = expected + numbers((100_000,), other).bfloat16()
    return communicator.transport, torch.equal(array, expected)


def test_automatic_choice_on_one_host_is_shared_memory_and_adds_bit_by_bit():
    assert run_ranks(reduce_in_bfloat16, 3) == [("shm", True)] * 3


def outlive(rank, world_size):
    communicator, unit = open_on_world(plan(world_size, (6, 2)))
    unit.gather([torch.full((3, 2), 7.0)])
    (full,) = unit.wait_gather()
    view = full[4:]
    communicator.barrier()
    unit.close()
    communicator.close()
    del unit, full, communicator
    return view.tolist()


def test_view_of_a_full_parameter_outlives_unit_and_group():
    assert run_ranks(outlive, 2) == [[[7.0, 7.0]] * 2] * 2
