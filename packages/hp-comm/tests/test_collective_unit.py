"""Unit channels over collectives: what is copied, what is read when, what is sent."""

import numpy as np
import pytest

from hp_comm import (
    CommError,
    CommTimeoutError,
    CommTrace,
    ParamSpec,
    TransferError,
    plan_unit,
)
from hp_comm.collective_unit import CollectiveUnit
from hp_comm.local import DoneWork, LocalCommunicator
from hp_comm.testing import NumpyOps, run_threads
from hp_comm.testing.units import chunk_boxes
from hp_mesh import Box


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


class LostWork(DoneWork):
    """A transfer that its wait gave up."""

    def wait(self, timeout_s: float | None = None) -> None:
        raise CommTimeoutError("all_gather", "world", 1, (3,), 5.0)


class LosingCommunicator(LocalCommunicator):
    """Loses the transfers that `loses` names, at their start or in their wait."""

    def __init__(self, loses: str) -> None:
        super().__init__("world", 0, ReleasedMemory())
        self.loses = loses

    def all_gather_into(self, output, source, *, async_op=False):
        if self.loses == "start of all_gather" and source.shape[0] == 20:
            raise TransferError("all_gather", "world", 1, "no route")
        work = super().all_gather_into(output, source, async_op=async_op)
        return LostWork() if self.loses == "all_gather" else work

    def all_reduce(self, array, *, op="sum", async_op=False):
        super().all_reduce(array, op=op, async_op=async_op)
        return LostWork() if self.loses == "all_reduce" else DoneWork()


class ReleasedMemory(NumpyOps):
    """Knows how much memory is given back at the moment."""

    def __init__(self) -> None:
        self.num_released = 0

    def release(self, array) -> None:
        self.num_released += 1

    def restore(self, array) -> None:
        self.num_released -= 1


def open_losing(loses: str) -> tuple[LosingCommunicator, CollectiveUnit, list[np.ndarray]]:
    comm = LosingCommunicator(loses)
    params = [spec((12,), 1), spec((20,), 1)]
    unit = CollectiveUnit(comm, plan_unit(params, world_size=1, bucket_below_bytes=40), "layers.3")
    return comm, unit, [np.zeros(12, np.float32), np.zeros(20, np.float32)]


def expect_refusal(unit: CollectiveUnit, arrays: list[np.ndarray], text: str) -> None:
    text = rf"unit 'layers.3' can't be used any more: {text}"
    for call in (
        lambda: unit.gather(arrays),
        unit.wait_gather,
        lambda: unit.reduce(arrays, 1.0),
        unit.wait_reduce,
    ):
        with pytest.raises(CommError, match=text):
            call()


@pytest.mark.parametrize("end", ["wait_gather", "free"])
def test_unit_whose_gather_timed_out_keeps_its_memory_and_refuses_at_once(end: str) -> None:
    comm, unit, arrays = open_losing("all_gather")
    assert comm.ops.num_released == 2
    unit.gather(arrays)
    with pytest.raises(CommTimeoutError):
        getattr(unit, end)()
    unit.free()  # a transfer that was given up may still write into this memory
    assert comm.ops.num_released == 0
    expect_refusal(unit, arrays, r"a gather failed \(all_gather number 1")


def test_unit_whose_gather_failed_halfway_at_its_start_keeps_its_memory_and_refuses() -> None:
    comm, unit, arrays = open_losing("start of all_gather")
    with pytest.raises(TransferError):
        unit.gather(arrays)
    unit.free()
    assert comm.ops.num_released == 0
    expect_refusal(unit, arrays, r"a gather failed \(all_gather number 1 .* no route")


def test_unit_whose_reduction_failed_refuses() -> None:
    _, unit, arrays = open_losing("all_reduce")
    unit.reduce(arrays, 1.0)
    with pytest.raises(CommTimeoutError):
        unit.wait_reduce()
    expect_refusal(unit, arrays, "a reduction failed")


def test_refused_arguments_leave_the_unit_free() -> None:
    comm, unit, arrays = open_losing("nothing")
    with pytest.raises(CommError, match=r"shard of parameter 'w' of unit 'layers.3' has shape"):
        unit.gather([arrays[1], arrays[1]])
    assert comm.ops.num_released == 2
    unit.gather(arrays)
    assert comm.ops.num_released == 0
    unit.free()
    assert comm.ops.num_released == 2


def test_unit_without_anything_to_train_reduces_without_sending() -> None:
    comm, unit = open_recorded([spec((20,), 1, trainable=False)])
    with CommTrace() as trace:
        unit.reduce([None], 1.0)
        assert unit.wait_reduce() == (None,)
    assert comm.sent == []
    assert trace.counts() == {"reduce_scatter": 1}


@pytest.mark.parametrize("threshold", [0, 100], ids=["direct", "bucket"])
def test_scalar_parameter_on_one_rank(threshold: int) -> None:
    scalar = ParamSpec("s", (), (Box((), ()),), "float32", "float32", "float32")
    plan = plan_unit([scalar], world_size=1, bucket_below_bytes=threshold)
    unit = CollectiveUnit(LocalCommunicator("world", 0, NumpyOps()), plan, "scalar")
    unit.gather([np.array(3.0, np.float32)])
    (full,) = unit.wait_gather()
    unit.reduce([np.array(4.0, np.float32)], 0.5)
    (reduced,) = unit.wait_reduce()
    assert (full.shape, full.item(), reduced.shape, reduced.item()) == ((), 3.0, (), 2.0)
