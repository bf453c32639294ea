"""A unit's gradients over shared memory; ranks are threads, memory is real."""

import threading
import time

import numpy as np
import pytest

from hp_comm._shm import kernel
from hp_comm.errors import MismatchError
from hp_comm.plan import ParamSpec, plan_unit
from hp_comm.testing.shm import run_shm_threads
from hp_comm.testing.units import chunk_boxes, chunked_plan

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


def frozen_param():
    return ParamSpec(
        "rest", (4,), chunk_boxes((4,), 0, 2), "float32", "float32", "float32", trainable=False
    )


@WORLDS
def test_reduce_adds_in_index_order_bit_by_bit_and_scales(world):
    made = chunked_plan(world, SHAPES)

    def run(comm):
        unit, results = opened(comm, made), []
        for step in range(5):
            unit.reduce(fulls(made, step, comm.index), 0.5)
            results.append(unit.wait_reduce())
        return results

    for rank, steps in enumerate(run_shm_threads(run, world)):
        for step, found in enumerate(steps):
            totals = fulls(made, step, 0)
            for other in range(1, world):
                totals = [a + b for a, b in zip(totals, fulls(made, step, other), strict=True)]
            expected = cut(made, [total * np.float32(0.5) for total in totals], rank)
            for array, total in zip(found, expected, strict=True):
                np.testing.assert_array_equal(array, total)


@WORLDS
def test_reduce_casts_to_the_reduce_dtype_before_it_adds(world):
    made = chunked_plan(world, SHAPES, reduce_dtype="float64")

    def run(comm):
        unit = opened(comm, made)
        unit.reduce(fulls(made, comm.index), 1.0)
        return unit.wait_reduce()

    totals = [np.zeros(s.shape) for s in made.params]
    for rank in range(world):
        totals = [a + b.astype(np.float64) for a, b in zip(totals, fulls(made, rank), strict=True)]
    for rank, found in enumerate(run_shm_threads(run, world)):
        for array, expected in zip(found, cut(made, totals, rank), strict=True):
            assert array.dtype == np.float64
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    "users",
    [(), (0,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)],
    ids=lambda users: f"used on {users or 'none'}",
)
@pytest.mark.parametrize("reduce_dtype", ["float32", "float64"])
def test_reduce_of_a_parameter_used_on_some_ranks_is_the_sum_of_those(users, reduce_dtype):
    made = chunked_plan(3, (((6, 2), 0), ((2,), 0)), reduce_dtype=reduce_dtype)
    grads = [values((6, 2), rank) for rank in range(3)]

    def run(comm):
        unit = opened(comm, made)
        own = grads[comm.index] if comm.index in users else None
        unit.reduce([own, np.ones(2, np.float32)], 1.0)
        return unit.wait_reduce()

    for rank, (found, other) in enumerate(run_shm_threads(run, 3)):
        assert other.tolist() == ([3.0] if rank < 2 else [])
        if not users:
            assert found is None
        else:
            expected = sum(grads[user].astype(reduce_dtype) for user in users)
            np.testing.assert_array_equal(found, expected[2 * rank : 2 * rank + 2])


def test_reduce_leaves_frozen_parameters_out():
    trained = chunked_plan(2, SMALL).params[0]
    made = plan_unit([trained, frozen_param()], world_size=2)

    def run(comm):
        unit = opened(comm, made)
        gathered = cycle(unit, [np.full(2, 3.0, np.float32)] * 2)
        unit.reduce([np.ones(4, np.float32), None], 1.0)
        return [array.tolist() for array in gathered], unit.wait_reduce()

    for gathered, (trained, frozen) in run_shm_threads(run, 2):
        assert gathered == [[3.0] * 4] * 2
        assert trained.tolist() == [2.0, 2.0]
        assert frozen is None


def test_reduce_where_all_is_frozen_gives_nothing():
    made = plan_unit([frozen_param()], world_size=2)

    def run(comm):
        unit = opened(comm, made)
        unit.reduce([None], 1.0)
        return unit.wait_reduce()

    assert run_shm_threads(run, 2) == [(None,), (None,)]


def test_reduce_result_is_new_memory():
    def run(comm):
        unit, grad = opened(comm), np.ones(4, np.float32)
        unit.reduce([grad], 1.0)
        (first,) = unit.wait_reduce()
        unit.reduce([grad * 3], 1.0)
        (second,) = unit.wait_reduce()
        return first.tolist(), second.tolist(), grad.tolist()

    assert run_shm_threads(run, 2) == [([2.0, 2.0], [6.0, 6.0], [1.0] * 4)] * 2


def test_reductions_of_two_units_may_overlap():
    def run(comm):
        units = [opened(comm, label=f"layers.{i}") for i in range(3)]
        results, under_way = [], []
        for step in range(30):
            unit = units[step % 3]
            unit.reduce([np.full(4, step, np.float32)], 1.0)
            under_way.append(unit)
            if len(under_way) == 2:
                results.append(under_way.pop(0).wait_reduce()[0].tolist())
        results.append(under_way.pop().wait_reduce()[0].tolist())
        return results

    assert run_shm_threads(run, 2) == [[[2.0 * step] * 2 for step in range(30)]] * 2


def test_more_reductions_than_slots_may_be_under_way_and_end_in_any_order():
    def run(comm):
        units = [opened(comm, label=f"layers.{i}") for i in range(5)]
        for step, unit in enumerate(units):
            unit.reduce([np.full(4, step + 1.0, np.float32)], 1.0)
        order = (3, 0, 4, 1, 2)
        return {step: units[step].wait_reduce()[0].tolist() for step in order}

    want = {step: [2.0 * (step + 1)] * 2 for step in range(5)}
    assert run_shm_threads(run, 2) == [want] * 2


def test_writer_of_a_slot_waits_until_all_have_read_it():
    may_read, waited = threading.Event(), []

    def run(comm):
        units = [opened(comm, label=f"layers.{i}") for i in range(3)]
        units[0].reduce([np.full(4, 1.0, np.float32)], 1.0)
        units[1].reduce([np.full(4, 2.0, np.float32)], 1.0)
        if comm.index == 1:
            may_read.wait(10)
            time.sleep(0.4)
        results = [units[0].wait_reduce()[0].tolist()]
        may_read.set()
        start = time.monotonic()
        units[2].reduce([np.full(4, 3.0, np.float32)], 1.0)
        if comm.index == 0:
            waited.append(time.monotonic() - start)
        return results + [unit.wait_reduce()[0].tolist() for unit in units[1:]]

    assert run_shm_threads(run, 2) == [[[2.0] * 2, [4.0] * 2, [6.0] * 2]] * 2
    assert waited[0] >= 0.3


def test_slots_grow_while_a_reduction_is_under_way():
    large = chunked_plan(2, (((5000,), 0),))

    def run(comm):
        first = opened(comm)
        first.reduce([np.ones(4, np.float32)], 1.0)
        second = opened(comm, large, "layers.1")
        second.reduce([np.full(5000, 2.0, np.float32)], 1.0)
        results = [first.wait_reduce()[0].tolist(), second.wait_reduce()[0].tolist()]
        first.reduce([np.full(4, 5.0, np.float32)], 1.0)
        return [*results, first.wait_reduce()[0].tolist()]

    assert run_shm_threads(run, 2) == [[[2.0] * 2, [4.0] * 2500, [10.0] * 2]] * 2


def test_ranks_that_reduce_different_units_learn_who_is_at_which():
    def run(comm):
        units = [opened(comm, label=f"layers.{i}") for i in range(2)]
        unit = units[comm.index]
        unit.reduce([np.ones(4, np.float32)], 1.0)
        with pytest.raises(MismatchError) as caught:
            unit.wait_reduce()
        return str(caught.value)

    for text in run_shm_threads(run, 2):
        assert "rank 0: reduce of layers.0 number 1; rank 1: reduce of layers.1 number 1" in text


def test_large_result_that_is_kept_is_never_written_again_and_its_memory_is_used_again():
    def run(comm):
        unit = opened(comm, chunked_plan(2, (((100_000,), 0),)))
        kept, places = [], []
        for step in range(6):
            unit.reduce([np.full(100_000, step, np.float32)], 1.0)
            (total,) = unit.wait_reduce()
            if step < 2:
                kept.append(total[7:])
            places.append(total.ctypes.data)
            del total
        return [(float(array.min()), float(array.max())) for array in kept], len(set(places[2:]))

    assert run_shm_threads(run, 2) == [([(0.0, 0.0), (2.0, 2.0)], 1)] * 2
