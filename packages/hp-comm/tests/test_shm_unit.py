"""A unit's parameters and gradients over shared memory; ranks are threads, memory is real."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_comm._shm import kernel
from hp_comm._shm.unit import PUNCH_VARIABLE
from hp_comm.errors import CommError, CommTimeoutError, MismatchError, TransportError
from hp_comm.plan import ParamSpec, UnitPlan, plan_unit
from hp_comm.testing.shm import run_shm_threads
from hp_comm.trace import CommTrace
from hp_mesh import Box, shard_bounds

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4], ids="{} ranks".format)
Shapes = tuple[tuple[tuple[int, ...], int], ...]
SHAPES: Shapes = (((5, 7), 0), ((4, 6), 1), ((3,), 0), ((0, 4), 0), ((1, 9, 2), 1), ((700, 9), 0))


def boxes(shape: tuple[int, ...], dim: int, world: int) -> tuple[Box, ...]:
    made = []
    for rank in range(world):
        start, stop = shard_bounds(shape[dim], world, rank)
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, stop - start
        made.append(Box(tuple(offsets), tuple(sizes)))
    return tuple(made)


def spec(name, shape, dim, world, **dtypes) -> ParamSpec:
    kinds = {"storage_dtype": "float32", "compute_dtype": "float32", "reduce_dtype": "float32"}
    return ParamSpec(name, shape, boxes(shape, dim, world), **{**kinds, **dtypes})


def plan(world: int, shapes: Shapes = SHAPES, **dtypes) -> UnitPlan:
    specs = [spec(f"p{i}", shape, dim, world, **dtypes) for i, (shape, dim) in enumerate(shapes)]
    return plan_unit(specs, world_size=world)


def small(world: int) -> UnitPlan:
    return plan(world, (((4,), 0),))


def values(shape, *seed) -> np.ndarray:
    return np.random.default_rng([*seed]).normal(size=shape).astype(np.float32)


def fulls(unit_plan: UnitPlan, *seed) -> list[np.ndarray]:
    return [values(s.shape, i, *seed) for i, s in enumerate(unit_plan.params)]


def cut(unit_plan: UnitPlan, arrays, rank: int) -> list[np.ndarray]:
    pairs = zip(arrays, unit_plan.params, strict=True)
    return [array[s.boxes[rank].slices()] for array, s in pairs]


def opened(comm, unit_plan: UnitPlan | None = None, label: str = "layers.0"):
    return comm.open_unit(unit_plan or small(len(comm.ranks)), label=label)


def cycle(unit, shards) -> tuple[np.ndarray, ...]:
    unit.gather(shards)
    found = unit.wait_gather()
    copies = tuple(array.copy() for array in found)
    unit.free()
    return copies


@WORLDS
def test_gather_makes_uneven_boxes_of_any_dim_whole(world):
    made = plan(world)

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
    made = plan(2, compute_dtype="float16")

    def run(comm):
        found = cycle(opened(comm, made), cut(made, fulls(made), comm.index))
        return [str(array.dtype) for array in found], found

    for dtypes, found in run_shm_threads(run, 2):
        assert set(dtypes) == {"float16"}
        for array, expected in zip(found, fulls(made), strict=True):
            np.testing.assert_array_equal(array, expected.astype(np.float16))


def test_shards_may_change_as_soon_as_gather_returns():
    made = plan(2)

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
    made, meet = plan(2, (((4096, 2), 0),)), threading.Barrier(2)

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


@WORLDS
def test_reduce_adds_in_index_order_bit_by_bit_and_scales(world):
    made = plan(world)

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
    made = plan(world, reduce_dtype="float64")

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
    made = plan(3, (((6, 2), 0), ((2,), 0)), reduce_dtype=reduce_dtype)
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
    specs = [spec("w", (4,), 0, 2), spec("frozen", (4,), 0, 2, trainable=False)]
    made = plan_unit(specs, world_size=2)

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
    made = plan_unit([spec("frozen", (4,), 0, 2, trainable=False)], world_size=2)

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
    large = plan(2, (((5000,), 0),))

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


def test_plans_that_differ_between_ranks_are_refused_naming_them():
    def run(comm):
        with pytest.raises(MismatchError) as caught:
            opened(comm, plan(2, (((4 + comm.index,), 0),)), label="layers.0")
        return str(caught.value)

    for text in run_shm_threads(run, 2):
        assert "rank 0: open_unit 'layers.0' with 1 parameters, plan" in text


def test_plan_for_another_group_size_is_refused():
    def run(comm):
        with pytest.raises(CommError, match=r"planned for 3 ranks and opened on .* of 2"):
            opened(comm, small(3))

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


def test_pages_are_given_back_when_asked_and_gathers_stay_right(monkeypatch):
    monkeypatch.setenv(PUNCH_VARIABLE, "1")
    made = plan(2, (((200_000,), 0),))

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


def test_trace_shows_one_call_each_and_nothing_copied():
    made = plan(2, (((4, 3), 0), ((2,), 0)), compute_dtype="float16")
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
    made = plan(world, tuple(shapes))

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
