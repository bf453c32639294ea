"""Unit channels over collectives: what is copied, what is read when, what is sent."""

import numpy as np
import pytest

from hp_comm import CommTrace, ParamSpec, plan_unit
from hp_comm.collective_unit import CollectiveUnit
from hp_comm.local import DoneWork, LocalCommunicator
from hp_comm.testing import NumpyOps, run_threads
from hp_comm.testing.units import chunk_boxes


def spec(shape: tuple[int, ...], num_ranks: int, dim: int = 0, **more: object) -> ParamSpec:
    dtypes = dict.fromkeys(("storage_dtype", "compute_dtype", "reduce_dtype"), "float32")
    return ParamSpec("w", shape, chunk_boxes(shape, dim, num_ranks), **{**dtypes, **more})


def copied(params: list[ParamSpec], *, padded: bool, threshold: int = 0) -> tuple[int, int]:
    """Return the bytes that both ranks of two copy for a gather and for a reduction."""
    plan = plan_unit(params, world_size=2, bucket_below_bytes=threshold)

    def run(comm) -> None:
        unit = comm.open_unit(plan, label="layers.0")
        shards = []
        for one in params:
            box = one.boxes[comm.index]
            room = one.boxes[0].num_elements if padded else box.num_elements
            memory = np.zeros(room, one.storage_dtype)
            shards.append(memory[: box.num_elements].reshape(box.sizes))
        unit.gather(shards)
        unit.wait_gather()
        unit.reduce([np.zeros(one.shape, one.compute_dtype) for one in params], 1.0)
        unit.wait_reduce()

    with CommTrace() as trace:
        run_threads(run, 2)
    return trace.copied_bytes("all_gather"), trace.copied_bytes("reduce_scatter")


@pytest.mark.parametrize(
    ("params", "padded", "expected"),
    [
        pytest.param([spec((4, 3), 2)], False, (0, 0), id="even"),
        # uneven: each rank copies its whole gradient of 5 x 3 floats to pad it
        pytest.param([spec((5, 3), 2)], True, (0, 2 * 60), id="uneven with room"),
        # and the last rank, whose 2 rows have no room for a third, its shard
        pytest.param([spec((5, 3), 2)], False, (24, 2 * 60), id="uneven without room"),
        # a cast copies 2 shards of 2 x 3 to 2-byte numbers, 2 gradients of 4 x 3 to 4-byte ones
        pytest.param([spec((4, 3), 2, compute_dtype="float16")], False, (24, 96), id="cast"),
        # a bucket: shards in (4 x 3 floats in all), full parameters out, gradients in
        pytest.param([spec((3, 4), 2, dim=1)], False, (48 + 96, 96), id="bucket"),
    ],
)
def test_copied_bytes_are_those_that_the_layout_needs(
    params: list[ParamSpec], padded: bool, expected: tuple[int, int]
) -> None:
    assert copied(params, padded=padded) == expected


class Recorder(LocalCommunicator):
    """Notes what is sent, and keeps flags from being read before `wait_reduce`."""

    def __init__(self) -> None:
        super().__init__("world", 0, ReadCounter())
        self.sent: list[str] = []

    def all_gather_into(self, output, source, *, async_op=False):
        self.sent.append(f"all_gather {source.shape[0]}")
        return super().all_gather_into(output, source, async_op=async_op)

    def reduce_scatter_into(self, output, source, *, op="sum", async_op=False):
        self.sent.append(f"reduce_scatter {source.shape[0]}")
        return super().reduce_scatter_into(output, source, op=op, async_op=async_op)

    def all_reduce(self, array, *, op="sum", async_op=False):
        self.sent.append(f"all_reduce {array.shape[0]}")
        self.ops.flags = array
        return DoneWork()


class ReadCounter(NumpyOps):
    """Counts how often the flags, which lie on the device, are copied to the host."""

    def __init__(self) -> None:
        self.flags = None
        self.num_reads = 0

    def copy(self, target, source) -> None:
        self.num_reads += source is self.flags
        super().copy(target, source)


def open_recorded(params: list[ParamSpec]) -> tuple[Recorder, CollectiveUnit]:
    comm = Recorder()
    plan = plan_unit(params, world_size=1, bucket_below_bytes=40)
    return comm, CollectiveUnit(comm, plan, "unit")


def test_unit_sends_big_parameters_alone_and_small_ones_together() -> None:
    comm, unit = open_recorded([spec((20,), 1), spec((3,), 1), spec((30,), 1), spec((4,), 1)])
    unit.gather([np.zeros(n, np.float32) for n in (20, 3, 30, 4)])
    unit.wait_gather()
    unit.reduce([np.zeros(n, np.float32) for n in (20, 3, 30, 4)], 1.0)
    assert comm.sent == [
        *("all_gather 20", "all_gather 30", "all_gather 7"),
        *("reduce_scatter 20", "reduce_scatter 30", "reduce_scatter 7", "all_reduce 4"),
    ]


def test_frozen_parameters_are_not_reduced() -> None:
    comm, unit = open_recorded([spec((20,), 1, trainable=False), spec((3,), 1)])
    unit.reduce([np.ones(20, np.float32), np.ones(3, np.float32)], 1.0)
    frozen, reduced = unit.wait_reduce()
    assert comm.sent == ["reduce_scatter 3", "all_reduce 2"]
    assert frozen is None
    assert reduced.tolist() == [1.0] * 3


def test_empty_parameters_are_not_sent() -> None:
    comm, unit = open_recorded([spec((0, 3), 1)])
    unit.gather([np.zeros((0, 3), np.float32)])
    (full,) = unit.wait_gather()
    unit.reduce([np.zeros((0, 3), np.float32)], 1.0)
    (reduced,) = unit.wait_reduce()
    assert comm.sent == ["all_reduce 1"]
    assert full.shape == reduced.shape == (0, 3)


@pytest.mark.parametrize(
    ("used", "num_reads"),
    [
        pytest.param([True, True, False], 0, id="all that train"),
        pytest.param([True, False, False], 1, id="one unused"),
    ],
)
def test_flags_are_read_only_where_a_gradient_is_missing_and_not_before_the_end(
    used: list[bool], num_reads: int
) -> None:
    comm, unit = open_recorded([spec((20,), 1), spec((3,), 1), spec((4,), 1, trainable=False)])
    grads = [np.ones(n, np.float32) if u else None for n, u in zip((20, 3, 4), used, strict=True)]
    unit.reduce(grads, 1.0)
    assert comm.ops.num_reads == 0
    found = unit.wait_reduce()
    assert comm.ops.num_reads == num_reads
    assert [array is not None for array in found] == used


def test_unit_is_finished_in_new_memory() -> None:
    _, unit = open_recorded([spec((20,), 1)])
    grad = np.ones(20, np.float32)
    unit.reduce([grad], 2.0)
    (reduced,) = unit.wait_reduce()
    grad[:] = 9
    assert reduced.tolist() == [2.0] * 20
