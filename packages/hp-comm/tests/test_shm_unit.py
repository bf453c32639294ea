"""Opening, misusing and closing units over shared memory; ranks are threads, memory is real."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_comm._shm import kernel
from hp_comm.errors import CommError, MismatchError, TransportError
from hp_comm.testing.shm import run_shm_threads
from hp_comm.testing.units import chunked_plan
from hp_comm.trace import CommTrace

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
SMALL = (((4,), 0),)


def values(shape, *seed) -> np.ndarray:
    return np.random.default_rng([*seed]).normal(size=shape).astype(np.float32)


def fulls(unit_plan, *seed) -> list[np.ndarray]:
    return [values(s.shape, i, *seed) for i, s in enumerate(unit_plan.params)]


def cut(unit_plan, arrays, rank: int) -> list[np.ndarray]:
    pairs = zip(arrays, unit_plan.params, strict=True)
    return [array[s.boxes[rank].slices()] for array, s in pairs]


def opened(comm, unit_plan=None, label: str = "layers.0"):
    return comm.open_unit(unit_plan or chunked_plan(len(comm.ranks), SMALL), label=label)


def cycle(unit, shards) -> tuple[np.ndarray, ...]:
    unit.gather(shards)
    found = unit.wait_gather()
    copies = tuple(array.copy() for array in found)
    unit.free()
    return copies


def test_ranks_that_wait_for_each_other_in_different_calls_are_told_at_once():
    meet = threading.Barrier(3)

    def run(comm):
        unit = opened(comm)
        start = time.monotonic()
        if comm.index != 1:
            unit.gather([np.zeros(2 if comm.index < 2 else 0, np.float32)])
        with pytest.raises(MismatchError) as caught:
            comm.barrier() if comm.index == 1 else unit.wait_gather()
        waited_s = time.monotonic() - start
        meet.wait(10)  # closing a group ends the others' waits with another error
        return str(caught.value), waited_s

    for text, waited_s in run_shm_threads(run, 3, timeout_s=30.0):
        assert "rank 0: gather of layers.0 number 1; rank 1: barrier number" in text
        assert waited_s < 10


def test_plans_that_differ_between_ranks_are_refused_naming_them():
    def run(comm):
        with pytest.raises(MismatchError) as caught:
            opened(comm, chunked_plan(2, (((4 + comm.index,), 0),)), label="layers.0")
        return str(caught.value)

    for text in run_shm_threads(run, 2):
        assert "rank 0: open_unit 'layers.0' with 1 parameters, plan" in text


def test_plan_for_another_group_size_is_refused():
    def run(comm):
        with pytest.raises(CommError, match=r"planned for 3 ranks and opened on .* of 2"):
            opened(comm, chunked_plan(3, SMALL))

    run_shm_threads(run, 2)


def test_open_unit_without_memory_is_refused_on_every_rank(monkeypatch):
    from hp_comm._shm.segment import Segment  # noqa: PLC0415  # only this test breaks it

    def run(comm):
        comm.barrier()
        monkeypatch.setattr(Segment, "create", _fail_to_create)
        with pytest.raises(TransportError, match=r"rank 0: .*no room today"):
            opened(comm)

    run_shm_threads(run, 2)


def _fail_to_create(num_bytes):
    raise OSError(12, "no room today")


BAD_CALLS = {
    "too few shards": (lambda unit: unit.gather([]), "0 shards for 1 parameters"),
    "shard shape": (
        lambda unit: unit.gather([np.zeros(3, np.float32)]),
        r"shape \(3,\) for parameter 'p0'; this rank's box has shape \(2,\)",
    ),
    "too many gradients": (
        lambda unit: unit.reduce([None, None], 1.0),
        "2 gradients for 1 parameters",
    ),
    "gradient shape": (
        lambda unit: unit.reduce([np.zeros(2, np.float32)], 1.0),
        r"shape \(2,\) for parameter 'p0' of shape \(4,\)",
    ),
    "wait_gather first": (lambda unit: unit.wait_gather(), "without a gather before"),
    "wait_reduce first": (lambda unit: unit.wait_reduce(), "without a reduce before"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_call_that_does_not_fit_is_refused_before_anything_changes(name):
    call, text = BAD_CALLS[name]

    def run(comm):
        unit = opened(comm)
        if comm.index == 0:
            with pytest.raises(CommError, match=text):
                call(unit)
        unit.reduce([np.ones(4, np.float32)], 1.0)
        return cycle(unit, [np.ones(2, np.float32)])[0].tolist(), unit.wait_reduce()[0].tolist()

    assert run_shm_threads(run, 2) == [([1.0] * 4, [2.0] * 2)] * 2


def test_gather_or_reduce_twice_is_refused():
    def run(comm):
        unit = opened(comm)
        unit.gather([np.ones(2, np.float32)])
        unit.reduce([np.ones(4, np.float32)], 1.0)
        with pytest.raises(CommError, match="weren't freed"):
            unit.gather([np.ones(2, np.float32)])
        with pytest.raises(CommError, match="Call wait_reduce first"):
            unit.reduce([np.ones(4, np.float32)], 1.0)

    run_shm_threads(run, 2)


def test_closed_unit_refuses_calls_and_its_arrays_stay_readable():
    def run(comm):
        unit = opened(comm)
        unit.gather([np.full(2, 4.0, np.float32)])
        (full,) = unit.wait_gather()
        comm.barrier()
        unit.close()
        unit.close()
        unit.free()
        with pytest.raises(CommError, match="was closed"):
            unit.gather([np.ones(2, np.float32)])
        del unit
        gc.collect()
        return full.tolist()

    assert run_shm_threads(run, 2) == [[4.0] * 4] * 2


def test_unit_closed_amid_its_calls_does_not_hold_the_others_up():
    def run(comm):
        first, second = opened(comm), opened(comm, label="layers.1")
        first.gather([np.ones(2, np.float32)])
        first.reduce([np.ones(4, np.float32)], 1.0)
        if comm.index == 0:
            first.close()
        else:
            first.wait_gather()
            first.free()
            first.wait_reduce()
            first.gather([np.ones(2, np.float32)])  # needs rank 0's lease back
        found = []
        for step in range(4):
            second.reduce([np.full(4, step, np.float32)], 1.0)
            found.append(second.wait_reduce()[0].tolist())
        return found

    assert run_shm_threads(run, 2) == [[[2.0 * step] * 2 for step in range(4)]] * 2


def count_mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:hyper-parallel")


def test_units_and_groups_leave_no_mapping_behind():
    def run(comm):
        for number in range(3):
            unit = opened(comm, label=f"layers.{number}")
            cycle(unit, [np.ones(2, np.float32)])
            unit.reduce([np.ones(4, np.float32)], 1.0)
            unit.wait_reduce()
            unit.close()

    gc.collect()
    before = count_mappings()
    run_shm_threads(run, 2)
    gc.collect()
    assert count_mappings() == before


def test_trace_shows_one_call_each_and_nothing_copied():
    made = chunked_plan(2, (((4, 3), 0), ((2,), 0)), compute_dtype="float16")
    with CommTrace() as trace:

        def run(comm):
            unit = opened(comm, made)
            cycle(unit, cut(made, fulls(made), comm.index))
            unit.reduce(fulls(made), 0.5)
            unit.wait_reduce()

        run_shm_threads(run, 2)
    events = [event for event in trace.events if event.label == "layers.0"]
    assert trace.counts() == {"all_gather": 2, "reduce_scatter": 2}
    assert {event.transport for event in events} == {"shm"}
    assert trace.wire_bytes("all_gather") == 2 * 7 * 2
    assert trace.wire_bytes("reduce_scatter") == 2 * 7 * 4
    assert trace.copied_bytes() == 0


@settings(max_examples=25, deadline=None)
@given(
    world=st.integers(1, 4),
    shapes=st.lists(
        st.lists(st.integers(0, 6), min_size=1, max_size=3).flatmap(
            lambda shape: st.tuples(st.just(tuple(shape)), st.integers(0, len(shape) - 1))
        ),
        min_size=1,
        max_size=5,
    ),
    unused=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4))),
)
def test_any_unit_gathers_and_reduces_like_numpy(world, shapes, unused):
    made = chunked_plan(world, tuple(shapes))

    def run(comm):
        unit = opened(comm, made)
        gathered = cycle(unit, cut(made, fulls(made), comm.index))
        grads = [
            None if (comm.index, i) in unused else grad
            for i, grad in enumerate(fulls(made, comm.index))
        ]
        unit.reduce(grads, 2.0)
        return gathered, unit.wait_reduce()

    for rank, (gathered, reduced) in enumerate(run_shm_threads(run, world)):
        for index, one in enumerate(made.params):
            np.testing.assert_array_equal(gathered[index], fulls(made)[index])
            users = [r for r in range(world) if (r, index) not in unused]
            if not users:
                assert reduced[index] is None
                continue
            total = sum(fulls(made, r)[index].astype(np.float64) for r in users) * 2
            box = one.boxes[rank]
            np.testing.assert_allclose(reduced[index], total[box.slices()], rtol=1e-5, atol=1e-5)
