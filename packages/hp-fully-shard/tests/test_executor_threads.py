"""The executor on numpy arrays and thread ranks: real bytes, no framework."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from hp_comm.plan import ParamSpec, plan_unit
from hp_comm.ports import Array, Communicator
from hp_comm.testing import run_threads
from hp_fully_shard.executor import ExecutedUnit, Executor
from hp_fully_shard.scheduler import Scheduler, UnitSettings
from hp_mesh import Box, shard_bounds

SHAPES = ((7, 3), (2,), (4, 4))
NUM_UNITS = 3


def boxes(shape: tuple[int, ...], world: int) -> tuple[Box, ...]:
    """Return every rank's rows by the ceil rule."""
    found = []
    for index in range(world):
        start, stop = shard_bounds(shape[0], world, index)
        offsets = (start, *[0] * (len(shape) - 1))
        found.append(Box(offsets, (stop - start, *shape[1:])))
    return tuple(found)


class NumpyBinding:
    """Keeps a unit's tensors in plain lists."""

    def __init__(self, whole: list[np.ndarray], own: list[Box]) -> None:
        self.local = [w[box.slices()].copy() for w, box in zip(whole, own, strict=True)]
        self.full: Sequence[Array] | None = None
        self.grads: list[Array | None] = [None for _ in whole]
        self.kept: list[Array | None] = [None for _ in whole]
        self.reduced: list[Array | None] = [None for _ in whole]

    def shards(self) -> list[Array]:
        return list(self.local)

    def bind_full(self, full: Sequence[Array]) -> None:
        self.full = [np.array(array) for array in full]

    def bind_shards(self) -> None:
        self.full = None

    def take_grads(self) -> list[Array | None]:
        taken = [
            grad if kept is None else kept if grad is None else grad + kept
            for grad, kept in zip(self.grads, self.kept, strict=True)
        ]
        self.grads = [None for _ in taken]
        self.kept = [None for _ in taken]
        return taken

    def accumulate_grads(self) -> None:
        self.kept = self.take_grads()

    def put_grads(self, grads: Sequence[Array | None]) -> None:
        self.reduced = list(grads)

    def discard_grads(self) -> None:
        self.grads = [None for _ in self.grads]


def whole_tensors(unit: int) -> list[np.ndarray]:
    """Return the full parameters of one unit: distinct numbers."""
    return [
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * unit + 10 * index
        for index, shape in enumerate(SHAPES)
    ]


def open_unit(comm: Communicator, number: int) -> ExecutedUnit:
    """Return a unit whose bytes move over this communicator."""
    world = len(comm.ranks)
    specs = [
        ParamSpec(str(index), shape, boxes(shape, world), "float32", "float32", "float32")
        for index, shape in enumerate(SHAPES)
    ]
    own = [spec.boxes[comm.index] for spec in specs]
    return ExecutedUnit(
        label=f"unit{number}",
        channel=comm.open_unit(plan_unit(specs, world_size=world), label=f"unit{number}"),
        binding=NumpyBinding(whole_tensors(number), own),
        full_bytes=sum(4 * int(np.prod(shape)) for shape in SHAPES),
        factor=1.0 / world,
    )


def forward_and_backward(comm: Communicator, micro_batches: int) -> bool:
    world = len(comm.ranks)
    units = [open_unit(comm, number) for number in range(NUM_UNITS)]
    settings = [UnitSettings() for _ in units]
    scheduler = Scheduler(settings, root=0)
    executor = Executor(units, lambda name: nullcontext())
    for micro_batch in range(micro_batches):
        for one in settings:
            one.sync = micro_batch == micro_batches - 1
        for number, unit in enumerate(units):
            executor.run(scheduler.before_forward(number))
            for got, want in zip(unit.binding.full, whole_tensors(number), strict=True):
                np.testing.assert_array_equal(got, want)
            executor.run(scheduler.after_forward(number, awaits_backward=True))
            assert unit.binding.full is None
        for number in reversed(range(NUM_UNITS)):
            executor.run(scheduler.before_backward(number))
            binding = units[number].binding
            binding.grads = [w * (comm.index + 1) for w in whole_tensors(number)]
            binding.grads[1] = None  # used nowhere
            executor.run(scheduler.after_backward(number))
        executor.run(scheduler.backward_end())
    mean = micro_batches * sum(range(1, world + 1)) / world
    for number, unit in enumerate(units):
        for index, (got, want) in enumerate(
            zip(unit.binding.reduced, whole_tensors(number), strict=True)
        ):
            if index == 1:
                assert got is None
            else:
                own = boxes(SHAPES[index], world)[comm.index]
                np.testing.assert_allclose(got, want[own.slices()] * mean, rtol=1e-6)
    one_unit = units[0].full_bytes
    assert executor.full_bytes == 0
    assert executor.peak_full_bytes == 2 * one_unit
    return True


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_executor_moves_parameters_and_gradients(world: int, micro_batches: int) -> None:
    assert all(run_threads(forward_and_backward, world, micro_batches))
