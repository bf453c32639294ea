"""A unit's full parameters over shared memory; ranks are threads, memory is real."""

import threading
import time

import numpy as np
import pytest

from hp_comm._shm import kernel
from hp_comm._shm.unit import PUNCH_VARIABLE
from hp_comm.errors import CommTimeoutError
from hp_comm.testing.shm import run_shm_threads
from hp_comm.testing.units import chunked_plan

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4], ids="{} ranks".format)
SHAPES = (((5, 7), 0), ((4, 6), 1), ((3,), 0), ((0, 4), 0), ((1, 9, 2), 1), ((700, 9), 0))
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


@WORLDS
def test_gather_makes_uneven_boxes_of_any_dim_whole(world):
    made = chunked_plan(world, SHAPES)

    def run(comm):
        unit = opened(comm, made)
        return [cycle(unit, cut(made, fulls(made, step), comm.index)) for step in range(5)]

    for steps in run_shm_threads(run, world):
        for step, found in enumerate(steps):
            for array, expected in zip(found, fulls(made, step), strict=True):
                np.testing.assert_array_equal(array, expected)


def test_gather_returns_the_same_arrays_in_every_cycle():
    def run(comm):
        unit, shards = opened(comm), [np.zeros(2, np.float32)]
        seen = []
        for _ in range(3):
            unit.gather(shards)
            seen.append(unit.wait_gather())
            unit.free()
        return all(step[0] is seen[0][0] for step in seen)

    assert run_shm_threads(run, 2) == [True, True]


def test_gather_casts_from_storage_to_compute_dtype():
    made = chunked_plan(2, SHAPES, compute_dtype="float16")

    def run(comm):
        found = cycle(opened(comm, made), cut(made, fulls(made), comm.index))
        return [str(array.dtype) for array in found], found

    for dtypes, found in run_shm_threads(run, 2):
        assert set(dtypes) == {"float16"}
        for array, expected in zip(found, fulls(made), strict=True):
            np.testing.assert_array_equal(array, expected.astype(np.float16))


def test_shards_may_change_as_soon_as_gather_returns():
    made = chunked_plan(2, SHAPES)

    def run(comm):
        unit = opened(comm, made)
        shards = [array.copy() for array in cut(made, fulls(made), comm.index)]
        unit.gather(shards)
        for shard in shards:
            shard[...] = -1
        return [array.copy() for array in unit.wait_gather()]

    for found in run_shm_threads(run, 2):
        for array, expected in zip(found, fulls(made), strict=True):
            np.testing.assert_array_equal(array, expected)


def test_edit_of_a_full_parameter_stays_private_and_is_gone_after_the_next_gather():
    made, meet = chunked_plan(2, (((4096, 2), 0),)), threading.Barrier(2)

    def run(comm):
        unit, shards = opened(comm, made), [np.full((2048, 2), 1.0, np.float32)]
        unit.gather(shards)
        (full,) = unit.wait_gather()
        if comm.index == 0:
            full *= 5
            full[3000, 1] = 7
        meet.wait(10)
        during = full.copy()
        unit.free()
        (after,) = cycle(unit, [np.full((2048, 2), 2.0, np.float32)])
        return during, after

    (edited, first), (seen, second) = run_shm_threads(run, 2)
    assert edited[0, 0] == 5.0
    assert edited[3000, 1] == 7.0
    np.testing.assert_array_equal(seen, np.ones((4096, 2)))
    np.testing.assert_array_equal(first, np.full((4096, 2), 2.0))
    np.testing.assert_array_equal(second, np.full((4096, 2), 2.0))


def test_fast_writer_waits_until_a_slow_reader_has_freed():
    waited, slow_has = [], threading.Event()

    def run(comm):
        unit = opened(comm)
        unit.gather([np.full(2, 1.0, np.float32)])
        (full,) = unit.wait_gather()
        if comm.index == 0:
            unit.free()
            slow_has.wait(10)
            start = time.monotonic()
            unit.gather([np.full(2, 2.0, np.float32)])
            waited.append(time.monotonic() - start)
            return unit.wait_gather()[0].tolist()
        slow_has.set()
        time.sleep(0.5)
        seen = full.tolist()
        unit.free()
        unit.gather([np.full(2, 2.0, np.float32)])
        unit.wait_gather()
        return seen

    assert run_shm_threads(run, 2) == [[2.0] * 4, [1.0] * 4]
    assert waited[0] >= 0.4


def test_gather_does_not_wait_for_the_others_shards():
    has_gathered = threading.Event()

    def run(comm):
        unit = opened(comm)
        if comm.index == 1:
            assert has_gathered.wait(10)
        unit.gather([np.zeros(2, np.float32)])
        has_gathered.set()
        unit.wait_gather()

    run_shm_threads(run, 2)


def test_gather_that_a_rank_does_not_make_times_out_naming_it():
    meet = threading.Barrier(3)

    def run(comm):
        unit, caught = opened(comm), None
        if comm.index != 2:
            unit.gather([np.zeros(2, np.float32)])
            with pytest.raises(CommTimeoutError) as caught:
                unit.wait_gather()
        meet.wait(10)
        return caught and (caught.value.missing, caught.value.operation)

    results = run_shm_threads(run, 3, timeout_s=0.5)
    assert results[:2] == [((2,), "gather of layers.0")] * 2


def test_pages_are_given_back_when_asked_and_gathers_stay_right(monkeypatch):
    monkeypatch.setenv(PUNCH_VARIABLE, "1")
    made = chunked_plan(2, (((200_000,), 0),))

    def run(comm):
        unit = opened(comm, made)
        sums = []
        for step in range(20):
            unit.gather([np.full(100_000, step, np.float32)])
            (full,) = unit.wait_gather()
            sums.append(float(full.sum()))
            unit.free()
        comm.barrier()
        return sums, float(full.sum())

    for sums, after in run_shm_threads(run, 2):
        assert sums == [200_000.0 * step for step in range(20)]
        assert after == 0.0  # holes read as zeros
