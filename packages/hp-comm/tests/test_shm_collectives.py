"""Collectives over shared memory; ranks are threads, memory, sockets and futexes are real."""

import threading
import time

import numpy as np
import pytest

from hp_comm._shm import kernel
from hp_comm._shm.board import STAGE_BYTES
from hp_comm.errors import CommError, CommTimeoutError, MismatchError
from hp_comm.testing.shm import run_shm_threads
from hp_comm.trace import CommTrace

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4], ids="{} ranks".format)
LENGTHS = pytest.mark.parametrize(
    "length",
    [0, 1, 7, 20_000, 2 * STAGE_BYTES // 8 + 5],
    ids=["empty", "one", "odd", "long", "several rounds"],
)
FOLD = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod, "avg": np.mean}


def data(rank: int, length: int, dtype: str = "float64") -> np.ndarray:
    """Return numbers whose sums depend on their order, the same in every process."""
    return np.random.default_rng([rank, length]).normal(size=length).astype(dtype)


def in_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


@WORLDS
@LENGTHS
def test_all_gather_concatenates_by_index(world, length):
    def gather(comm):
        output = np.empty((world, length))
        comm.all_gather_into(output, data(comm.index, length))
        return output

    expected = np.stack([data(rank, length) for rank in range(world)])
    for found in run_shm_threads(gather, world):
        np.testing.assert_array_equal(found, expected)


@WORLDS
@LENGTHS
def test_all_reduce_adds_in_index_order_bit_by_bit(world, length):
    def reduce(comm):
        array = data(comm.index, length, "float32")
        comm.all_reduce(array)
        return array

    expected = in_order([data(rank, length, "float32") for rank in range(world)])
    for found in run_shm_threads(reduce, world):
        np.testing.assert_array_equal(found, expected)


@WORLDS
@LENGTHS
def test_reduce_scatter_adds_own_part_in_index_order_bit_by_bit(world, length):
    def reduce(comm):
        output = np.empty(length, np.float32)
        comm.reduce_scatter_into(output, data(comm.index, world * length, "float32"))
        return output

    total = in_order([data(rank, world * length, "float32") for rank in range(world)])
    for rank, found in enumerate(run_shm_threads(reduce, world)):
        np.testing.assert_array_equal(found, total.reshape(world, length)[rank])


@LENGTHS
@pytest.mark.parametrize("source", [0, 2])
def test_broadcast_gives_everybody_the_sources_array(length, source):
    def broadcast(comm):
        array = data(comm.index, length)
        comm.broadcast(array, source=source)
        return array

    for found in run_shm_threads(broadcast, 3):
        np.testing.assert_array_equal(found, data(source, length))


@pytest.mark.parametrize("op", FOLD)
@pytest.mark.parametrize("length", [5, 40_000], ids=["short", "long"])
def test_all_reduce_of_each_operation_equals_numpys(op, length):
    def reduce(comm):
        array = data(comm.index, length)
        comm.all_reduce(array, op=op)
        return array

    expected = FOLD[op](np.stack([data(rank, length) for rank in range(3)]), axis=0)
    for found in run_shm_threads(reduce, 3):
        np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("op", FOLD)
def test_reduce_scatter_of_each_operation_equals_numpys(op):
    def reduce(comm):
        output = np.empty(4)
        comm.reduce_scatter_into(output, data(comm.index, 12), op=op)
        return output

    expected = FOLD[op](np.stack([data(rank, 12) for rank in range(3)]), axis=0)
    for rank, found in enumerate(run_shm_threads(reduce, 3)):
        np.testing.assert_allclose(found, expected.reshape(3, 4)[rank], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "complex128"])
def test_all_gather_of_each_data_type_keeps_every_bit(dtype):
    def gather(comm):
        output = np.empty(10, dtype)
        comm.all_gather_into(output, np.arange(comm.index, comm.index + 5).astype(dtype))
        return output

    expected = np.concatenate([np.arange(r, r + 5).astype(dtype) for r in range(2)])
    for found in run_shm_threads(gather, 2):
        np.testing.assert_array_equal(found, expected)


def test_arrays_of_any_shape_are_taken_as_they_lie():
    def run(comm):
        scalar, cube = np.array(comm.index + 1.0), np.full((2, 3, 2), comm.index + 1.0)
        comm.all_reduce(scalar)
        comm.all_reduce(cube)
        return float(scalar), cube.tolist()

    for scalar, cube in run_shm_threads(run, 3):
        assert scalar == 6.0
        assert cube == np.full((2, 3, 2), 6.0).tolist()


def test_all_gather_bytes_of_any_lengths_comes_back_by_index():
    lengths = [0, 3, 2 * STAGE_BYTES + 1]

    def gather(comm):
        return comm.all_gather_bytes(bytes([comm.index]) * lengths[comm.index])

    expected = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    assert run_shm_threads(gather, 3) == [expected] * 3


def test_barrier_holds_everybody_until_the_last_has_come():
    arrivals: list[float] = []

    def meet(comm):
        if comm.index == 1:
            time.sleep(0.3)
            arrivals.append(time.monotonic())
        comm.barrier()
        return time.monotonic()

    leaves = run_shm_threads(meet, 3)
    assert min(leaves) >= arrivals[0]


def test_thousand_rounds_cross_the_wrap_of_the_numbers():
    def count(comm):
        array = np.zeros(1, np.int64)
        for number in range(1000):
            array[0] = number + comm.index
            comm.all_reduce(array)
            assert array[0] == 2 * number + 1
        return True

    assert run_shm_threads(count, 2) == [True, True]


def test_asynchronous_calls_finish_in_any_order_of_waits():
    def run(comm):
        arrays = [np.full(300_000, comm.index + 10.0 * i) for i in range(4)]
        works = [comm.all_reduce(array, async_op=True) for array in arrays]
        order = [2, 0, 3, 1] if comm.index else [3, 2, 1, 0]
        for number in order:
            works[number].wait()
        return [float(array[-1]) for array in arrays]

    assert run_shm_threads(run, 2) == [[1.0, 21.0, 41.0, 61.0]] * 2


def test_fast_rank_does_not_overwrite_what_a_slow_one_has_yet_to_read():
    def run(comm):
        outputs = [np.empty(2) for _ in range(3)]
        sources = [np.array([10.0 * number + comm.index]) for number in range(3)]
        if comm.index == 0:
            for output, source in zip(outputs, sources, strict=True):
                comm.all_gather_into(output, source)
            return [output.tolist() for output in outputs]
        works = [comm.all_gather_into(outputs[i], sources[i], async_op=True) for i in range(2)]
        time.sleep(0.3)  # the other rank has all it needs for its first two calls
        for work in works:
            work.wait()
        comm.all_gather_into(outputs[2], sources[2])
        return [output.tolist() for output in outputs]

    expected = [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    assert run_shm_threads(run, 2) == [expected] * 2


def test_work_reports_completion_and_makes_progress_when_asked():
    def run(comm):
        array = np.ones(3 * STAGE_BYTES // 8)
        work = comm.all_reduce(array, async_op=True)
        end = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.001)
        return work.is_completed(), float(array.sum()) / len(array)

    assert run_shm_threads(run, 2) == [(True, 2.0)] * 2


def test_work_is_not_completed_before_the_others_came():
    start = threading.Event()

    def run(comm):
        if comm.index == 1:
            start.wait(10)
        work = comm.all_reduce(np.ones(1), async_op=True)
        early = comm.index == 0 and work.is_completed()
        start.set()
        work.wait()
        return early

    assert run_shm_threads(run, 2) == [False, False]


BAD_CALLS = {
    "size": (lambda comm: comm.all_gather_into(np.empty(5), np.empty(2)), "2 x 2 = 4 elements"),
    "data type": (
        lambda comm: comm.all_gather_into(np.empty(4, np.int32), np.empty(2)),
        "int32 and source float64",
    ),
    "contiguity": (lambda comm: comm.all_reduce(np.empty((4, 4))[:, :2]), "isn't contiguous"),
    "operation": (lambda comm: comm.all_reduce(np.empty(2), op="median"), "'median'"),
    "source": (lambda comm: comm.broadcast(np.empty(2), source=2), "group index 2"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_call_with_bad_arguments_raises_before_anything_is_sent(name):
    call, text = BAD_CALLS[name]

    def run(comm):
        if comm.index == 0:
            with pytest.raises(CommError, match=text):
                call(comm)
        array = np.ones(1)
        comm.all_reduce(array)  # the others never noticed
        return float(array[0])

    assert run_shm_threads(run, 2) == [2.0, 2.0]


DIFFERENT = {
    "operations": (
        lambda comm: comm.barrier(),
        lambda comm: comm.all_reduce(np.ones(2)),
        ["rank 0: barrier", "rank 1: all_reduce sum 2 float64"],
    ),
    "lengths": (
        lambda comm: comm.all_reduce(np.ones(3)),
        lambda comm: comm.all_reduce(np.ones(2)),
        ["rank 0: all_reduce sum 3 float64", "rank 1: all_reduce sum 2 float64"],
    ),
    "data types": (
        lambda comm: comm.broadcast(np.ones(2, np.int32)),
        lambda comm: comm.broadcast(np.ones(2)),
        ["rank 0: broadcast from 0 2 int32", "rank 1: broadcast from 0 2 float64"],
    ),
    "reductions": (
        lambda comm: comm.all_reduce(np.ones(2), op="max"),
        lambda comm: comm.all_reduce(np.ones(2)),
        ["rank 0: all_reduce max", "rank 1: all_reduce sum"],
    ),
    "bytes and array": (
        lambda comm: comm.all_gather_bytes(b"x"),
        lambda comm: comm.all_reduce(np.ones(2)),
        ["rank 0: all_gather_bytes", "rank 1: all_reduce sum"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_at_different_calls_learn_who_is_at_which(name):
    first, second, texts = DIFFERENT[name]

    def run(comm):
        with pytest.raises(MismatchError) as caught:
            (second if comm.index == 1 else first)(comm)
        with pytest.raises(CommError, match="after an earlier error"):
            comm.barrier()
        comm.close()
        return str(caught.value)

    for message in run_shm_threads(run, 3):
        assert all(text in message for text in texts)


def test_wait_ends_at_the_time_out_naming_who_is_missing():
    ready = threading.Barrier(3)

    def run(comm):
        caught = None
        if comm.index != 1:
            with pytest.raises(CommTimeoutError) as caught:
                comm.barrier(timeout_s=0.3)
        ready.wait(10)
        return caught and (caught.value.missing, caught.value.sequence, str(caught.value))

    first, _late, third = run_shm_threads(run, 3)
    for missing, sequence, text in (first, third):
        assert missing == (1,)
        assert sequence == 1
        assert "barrier number 1 of group 'threads' waited 0.3 s and rank 1" in text


def test_wait_for_a_rank_that_closed_ends_long_before_the_time_out():
    def run(comm):
        if comm.index == 1:
            comm.close()
            return None
        start = time.monotonic()
        with pytest.raises(CommTimeoutError) as caught:
            comm.all_reduce(np.ones(1))
        return caught.value.missing, time.monotonic() - start

    results = run_shm_threads(run, 3, timeout_s=30.0)
    for missing, waited_s in (results[0], results[2]):
        assert missing == (1,)
        assert waited_s < 10


def test_closed_group_refuses_calls():
    def run(comm):
        comm.close()
        comm.close()
        with pytest.raises(CommError, match="was closed"):
            comm.barrier()

    run_shm_threads(run, 2)


def test_trace_counts_calls_and_what_each_rank_receives():
    with CommTrace() as trace:

        def run(comm):
            comm.all_gather_into(np.empty(8), np.empty(4))
            comm.reduce_scatter_into(np.empty(4), np.empty(8))
            comm.all_reduce(np.empty(8))
            comm.broadcast(np.empty(8), source=1)
            comm.barrier()

        run_shm_threads(run, 2)
    wire = {kind: trace.wire_bytes(kind) for kind in trace.counts()}
    assert set(trace.counts().values()) == {2}
    assert wire == {
        "all_gather": 2 * 32,
        "reduce_scatter": 2 * 32,
        "all_reduce": 2 * 64,
        "broadcast": 64,
        "barrier": 0,
    }
    assert trace.copied_bytes() == 0
