"""How often and how much a unit communicates, and that the direct path copies nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hp_comm import CommTrace
from hp_comm.testing import run_ranks
from hp_fully_shard import fully_shard
from hp_mesh import init_device_mesh

WIDTH = 256
NUM_BLOCKS = 3


def make_model() -> nn.Sequential:
    """Return blocks of one big weight each (no bias), as units under a root without parameters."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(NUM_BLOCKS)]
    return nn.Sequential(*blocks)


def shard(model: nn.Sequential, reshard: bool) -> None:
    """Make every block a unit, then the model."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    """Run one forward and backward."""
    model(torch.ones(2, WIDTH)).pow(2).mean().backward()


def traced(function: Callable[[], None]) -> CommTrace:
    """Return the trace of one call."""
    with CommTrace() as trace:
        function()
    return trace


def labels_of(trace: CommTrace, kind: str) -> list[str]:
    """Return the units whose collectives of this kind were started, in order."""
    return [event.label for event in trace.events if event.kind == kind and event.group]


def counts_per_unit(rank: int, world: int, reshard: bool) -> None:
    model = make_model()
    shard(model, reshard)
    step(model)  # opens the channels
    trace = traced(lambda: step(model))
    gathers = 2 if reshard else 1
    labels = labels_of(trace, "all_gather")
    assert sorted(labels) == sorted(["0", "1", "2"] * gathers)
    labels = labels_of(trace, "reduce_scatter")
    assert labels == ["2", "1", "0"]
    assert set(trace.counts()) == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_unit_gathers_once_each_way_and_reduces_once(
    world: int, reshard: bool, transport: str
) -> None:
    run_ranks(counts_per_unit, world, reshard, env={"HP_TRANSPORT": transport})


def bytes_and_copies(rank: int, world: int) -> None:
    model = make_model()
    shard(model, reshard=True)
    step(model)
    trace = traced(lambda: step(model))
    one_weight = WIDTH * WIDTH * 4
    rest = one_weight - one_weight // world  # what the other ranks hold
    assert trace.wire_bytes("all_gather") == 2 * NUM_BLOCKS * rest
    received = (world - 1) * (one_weight // world)
    assert trace.wire_bytes("reduce_scatter") == NUM_BLOCKS * received
    assert trace.copied_bytes() == 0


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("world", [2, 4])
def test_big_parameters_move_their_exact_bytes_and_no_copy(world: int, transport: str) -> None:
    run_ranks(bytes_and_copies, world, env={"HP_TRANSPORT": transport})


def no_reduction_without_sync(rank: int, world: int) -> None:
    model = make_model()
    shard(model, reshard=True)
    step(model)
    model.set_requires_gradient_sync(False)
    trace = traced(lambda: step(model))
    assert trace.counts() == {"all_gather": 2 * NUM_BLOCKS}
    model.set_requires_gradient_sync(True)
    assert traced(lambda: step(model)).counts()["reduce_scatter"] == NUM_BLOCKS


def test_micro_batch_without_sync_reduces_nothing() -> None:
    run_ranks(no_reduction_without_sync, 2)


def frozen_unit_is_not_reduced(rank: int, world: int) -> None:
    model = make_model()
    model[1].requires_grad_(False)
    shard(model, reshard=True)
    step(model)
    trace = traced(lambda: step(model))
    labels = labels_of(trace, "reduce_scatter")
    assert labels == ["2", "0"]
    assert model[1][0].weight.grad is None


def test_frozen_unit_moves_no_gradients() -> None:
    run_ranks(frozen_unit_is_not_reduced, 2)


def live_bytes(rank: int, world: int, reshard: bool) -> None:
    model = make_model()
    shard(model, reshard)
    step(model)
    executor = model._hp_unit.place.tree.executor
    one_weight = WIDTH * WIDTH * 4
    assert executor.full_bytes == 0
    # backward holds the running unit and the one that is gathered ahead
    assert executor.peak_full_bytes == (2 if reshard else NUM_BLOCKS) * one_weight
    local = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert local == NUM_BLOCKS * one_weight // world


@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
def test_full_parameters_alive_are_those_of_two_units(reshard: bool) -> None:
    run_ranks(live_bytes, 2, reshard)
