"""Ranks as threads: results, errors of one rank, ranks that end early or never come."""

import threading
import time

import numpy as np
import pytest

from hp_comm import CommError, CommTimeoutError, MismatchError
from hp_comm.ports import Communicator
from hp_comm.testing import run_threads


def test_run_threads_returns_results_by_rank_and_passes_arguments() -> None:
    assert run_threads(lambda comm, add: comm.index + add, 3, 10) == [10, 11, 12]


def test_run_threads_of_64_ranks_takes_seconds() -> None:
    def run(comm: Communicator) -> int:
        array = np.array([comm.index])
        for _ in range(10):
            comm.barrier()
        comm.all_reduce(array)
        return int(array[0])

    start = time.monotonic()
    assert run_threads(run, 64) == [64 * 63 // 2] * 64
    assert time.monotonic() - start < 20


def test_sums_do_not_depend_on_the_order_of_arrival() -> None:
    values = np.random.default_rng(0).normal(size=(8, 100)).astype(np.float32)

    def run(comm: Communicator, delays_s: list[float]) -> bytes:
        array = values[comm.index].copy()
        time.sleep(delays_s[comm.index])
        comm.all_reduce(array)
        return array.tobytes()

    delays_s = [0.003 * number for number in range(8)]
    forward, backward = run_threads(run, 8, delays_s), run_threads(run, 8, delays_s[::-1])
    assert len({*forward, *backward}) == 1


def test_error_of_one_rank_is_raised_at_once_not_the_others_time_out() -> None:
    def run(comm: Communicator) -> None:
        if comm.index == 1:
            raise ZeroDivisionError("rank 1's own")
        comm.barrier()

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 1's own"):
        run_threads(run, 3, timeout_s=50)
    assert time.monotonic() - start < 20


def test_rank_that_ended_is_named_without_waiting() -> None:
    start = time.monotonic()
    with pytest.raises(CommTimeoutError, match="barrier number 2 of group 'threads'") as caught:
        run_threads(lambda comm: [comm.barrier() for _ in range(1 + (comm.index != 2))], 3)
    assert caught.value.missing == (2,)
    assert time.monotonic() - start < 20


def test_rank_that_does_not_come_is_named_at_the_time_out() -> None:
    done = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.index == 0:
            done.wait(20)
            return
        with pytest.raises(CommTimeoutError, match=r"waited 0\.2 s") as caught:
            comm.all_reduce(np.zeros(2))
        assert caught.value.missing == (0,)
        done.set()

    run_threads(run, 2, timeout_s=0.2)


def test_barrier_has_a_time_out_of_its_own() -> None:
    def run(comm: Communicator) -> None:
        if comm.index == 0:
            time.sleep(1)
            return
        with pytest.raises(CommTimeoutError, match=r"waited 0\.1 s"):
            comm.barrier(timeout_s=0.1)

    run_threads(run, 2, timeout_s=30)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(3)), id="length"
        ),
        pytest.param(
            lambda c: c.all_reduce(np.zeros(2)), lambda c: c.all_reduce(np.zeros(2, int)), id="type"
        ),
        pytest.param(
            lambda c: c.all_reduce(np.zeros(2)),
            lambda c: c.all_reduce(np.zeros(2), op="max"),
            id="reduction",
        ),
        pytest.param(
            lambda c: c.broadcast(np.zeros(2), source=0),
            lambda c: c.broadcast(np.zeros(2), source=1),
            id="source",
        ),
        pytest.param(lambda c: c.barrier(), lambda c: c.all_gather_bytes(b""), id="operation"),
    ],
)
def test_ranks_at_different_calls_are_told(first, second) -> None:
    def run(comm: Communicator) -> str:
        with pytest.raises(MismatchError, match="ranks are at different calls") as caught:
            (second if comm.index else first)(comm)
        return str(caught.value)

    one, two = run_threads(run, 2)
    assert one == two
    assert "0: '" in one
    assert "1: '" in one


def test_refused_call_leaves_ranks_in_step() -> None:
    def run(comm: Communicator) -> float:
        array = np.ones(2)
        if comm.index == 0:
            with pytest.raises(CommError, match="'median' isn't known"):
                comm.all_reduce(array, op="median")
        comm.all_reduce(array)
        return float(array[0])

    assert run_threads(run, 2) == [2.0, 2.0]
