"""What every unit channel must do: checks that take a communicator, on all ranks of a group.

Part of `hp_comm.testing.conformance`, which runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm.errors import CommError, MismatchError
from hp_comm.plan import ParamSpec, UnitPlan, itemsize, padded_shard_elements, plan_unit
from hp_comm.testing.expectation import expect, fails, traced
from hp_comm.testing.units import chunk_boxes
from hp_comm.testing.values import Floats, numbers, put, total
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hp_comm.ports import Array, ArrayOps, Communicator, UnitChannel

NUM_CYCLES = 3
MANY_RANKS = 8
"""With more ranks than this, fewer parameters and one cycle are tried."""

SOMETIMES = "sometimes"
"""Name of the parameter that every second rank uses."""

NEVER = "never"
"""Name of the parameter that no rank uses."""

FEW = ("uneven", "columns", "narrow", SOMETIMES, NEVER)
"""The parameters that are tried with many ranks."""


def make_plan(num_ranks: int, *, bucket_below_bytes: int) -> UnitPlan:
    """Return a plan with every kind of parameter.

    Even and uneven, with empty shards, cut along another dim, in another order, in other data
    types, frozen, used on some ranks only and on none.

    Args:
        num_ranks: Number of ranks.
        bucket_below_bytes: 0 sends every parameter alone that can be; a large number none.
    """
    n = num_ranks
    f32, f64, f16 = "float32", "float64", "float16"
    rows = chunk_boxes((n + 1, 2), 0, n)
    params = [
        ParamSpec("even", (2 * n, 3), chunk_boxes((2 * n, 3), 0, n), f32, f32, f32),
        ParamSpec("uneven", (2 * n + 1, 3), chunk_boxes((2 * n + 1, 3), 0, n), f32, f32, f32),
        ParamSpec("short", (1, 4), chunk_boxes((1, 4), 0, n), f32, f32, f32),
        ParamSpec("vector", (3 * n - 1,), chunk_boxes((3 * n - 1,), 0, n), f32, f32, f32),
        ParamSpec("columns", (4, n + 2), chunk_boxes((4, n + 2), 1, n), f32, f32, f32),
        ParamSpec("depth", (2, 3, n), chunk_boxes((2, 3, n), 2, n), f32, f16, f32),
        ParamSpec("reversed", (n + 1, 2), rows[::-1], f32, f32, f32),
        ParamSpec("narrow", (2 * n + 1, 2), chunk_boxes((2 * n + 1, 2), 0, n), f32, f16, f32),
        ParamSpec("wide", (n, 2), chunk_boxes((n, 2), 0, n), f32, f64, f64),
        ParamSpec("half", (n + 1,), chunk_boxes((n + 1,), 0, n), f16, f16, f16),
        ParamSpec("frozen", (n, 3), chunk_boxes((n, 3), 0, n), f32, f32, f32, trainable=False),
        ParamSpec(SOMETIMES, (n + 2, 2), chunk_boxes((n + 2, 2), 0, n), f32, f32, f32),
        ParamSpec(NEVER, (n, 2), chunk_boxes((n, 2), 0, n), f32, f32, f32),
    ]
    if n > MANY_RANKS:
        params = [spec for spec in params if spec.name in FEW]
    return plan_unit(params, world_size=n, bucket_below_bytes=bucket_below_bytes)


@dataclass(frozen=True, slots=True)
class _Case:
    """One unit, and the values that its parameters and gradients have in each cycle."""

    comm: Communicator
    plan: UnitPlan

    @property
    def ops(self) -> ArrayOps:
        return self.comm.ops

    def full(self, number: int, cycle: int) -> Floats:
        return numbers(self.plan.params[number].shape, number, cycle)

    def own(self, number: int, whole: Floats) -> Floats:
        return whole[self.plan.params[number].boxes[self.comm.index].slices()]

    def shards(self) -> list[Array]:
        """Return this rank's shards, in memory with room for their padding."""
        return [
            put(self.ops, self.own(i, self.full(i, 0)), s.storage_dtype, padded_shard_elements(s))
            for i, s in enumerate(self.plan.params)
        ]

    def set_shards(self, shards: Sequence[Array], cycle: int) -> None:
        for i, shard in enumerate(shards):
            values = self.own(i, self.full(i, cycle))
            self.ops.copy(shard, put(self.ops, values, "float64"))

    def grads(self, cycle: int) -> list[Array | None]:
        """Return this rank's full gradients, in the compute dtype."""
        return [
            put(self.ops, self.grad(i, self.comm.index, cycle), s.compute_dtype)
            if self.uses(i, self.comm.index)
            else None
            for i, s in enumerate(self.plan.params)
        ]

    def grad(self, number: int, rank: int, cycle: int) -> Floats:
        return numbers(self.plan.params[number].shape, rank, number, cycle)

    def uses(self, number: int, rank: int) -> bool:
        spec = self.plan.params[number]
        return spec.trainable and spec.name != NEVER and (spec.name != SOMETIMES or rank % 2 == 0)

    def expect_full(self, found: Sequence[Array], cycle: int) -> None:
        for i, (array, spec) in enumerate(zip(found, self.plan.params, strict=True)):
            what = f"full {spec.name} in cycle {cycle}"
            expect(self.ops, array, self.full(i, cycle), spec.compute_dtype, what)

    def expect_reduced(self, found: Sequence[Array | None], cycle: int, factor: float) -> None:
        for i, (array, spec) in enumerate(zip(found, self.plan.params, strict=True)):
            users = [rank for rank in range(len(self.comm.ranks)) if self.uses(i, rank)]
            what = f"reduced {spec.name} in cycle {cycle}"
            if not users:
                assert array is None, f"{what}: something came, though no rank used it"
                continue
            assert array is not None, f"{what}: nothing came, though ranks {users} used it"
            wanted = self.own(i, total(spec.shape, users, i, cycle)) * factor
            expect(self.ops, array, wanted, spec.reduce_dtype, what)


def check_unit_cycles(comm: Communicator) -> None:
    """Full parameters and reduced gradients are right, cycle after cycle, in the same arrays."""
    for threshold in (0, 1 << 40):
        case = _Case(comm, make_plan(len(comm.ranks), bucket_below_bytes=threshold))
        unit = comm.open_unit(case.plan, label="layers.0")
        assert unit.plan == case.plan
        shards = case.shards()
        first: tuple[Array, ...] = ()
        for cycle in range(NUM_CYCLES if len(comm.ranks) <= MANY_RANKS else 1):
            case.set_shards(shards, cycle)
            unit.gather(shards)
            found = unit.wait_gather()
            case.expect_full(found, cycle)
            first = first or found
            assert all(a is b for a, b in zip(first, found, strict=True)), "other arrays"
            unit.free()
            grads = case.grads(cycle)
            unit.reduce(grads, 0.5)
            reduced = unit.wait_reduce()
            for grad in grads:  # they are the caller's again, and the results aren't theirs
                if grad is not None:
                    comm.ops.fill_zero(grad)
            case.expect_reduced(reduced, cycle, 0.5)
        unit.close()
        unit.close()


def check_shards_after_gather(comm: Communicator) -> None:
    """Full parameters stay as they were gathered when a rank changes its shard afterwards."""
    if len(comm.ranks) == 1:
        return  # a full parameter may be the shard itself
    case = _Case(comm, make_plan(len(comm.ranks), bucket_below_bytes=0))
    unit = comm.open_unit(case.plan, label="changed")
    shards = case.shards()
    unit.gather(shards)
    found = unit.wait_gather()
    comm.barrier()
    case.set_shards(shards, 1)
    comm.barrier()
    case.expect_full(found, 0)
    unit.free()
    unit.gather(shards)
    case.expect_full(unit.wait_gather(), 1)
    unit.free()
    unit.close()


def check_units_in_flight(comm: Communicator) -> None:
    """Units of one group are gathered and reduced while others are under way."""
    plans = [make_plan(len(comm.ranks), bucket_below_bytes=t) for t in (0, 1 << 40, 0)]
    cases = [_Case(comm, plan) for plan in plans]
    units = [comm.open_unit(case.plan, label=f"layers.{i}") for i, case in enumerate(cases)]
    for cycle in range(2 if len(comm.ranks) <= MANY_RANKS else 1):
        for unit, case in zip(units, cases, strict=True):
            shards = case.shards()
            case.set_shards(shards, cycle)
            unit.gather(shards)
            comm.barrier()
        for unit, case in zip(units, cases, strict=True):
            case.expect_full(unit.wait_gather(), cycle)
        for unit in units:
            unit.free()
        for unit, case in zip(units, cases, strict=True):
            unit.reduce(case.grads(cycle), 1.0)
        pairs = list(zip(units, cases, strict=True))
        for unit, case in pairs if cycle else reversed(pairs):
            case.expect_reduced(unit.wait_reduce(), cycle, 1.0)
    for unit in units:
        unit.close()


def check_gather_while_reducing(comm: Communicator) -> None:
    """A unit is gathered again, and others of the group work, before its reduction is read."""
    case = _Case(comm, make_plan(len(comm.ranks), bucket_below_bytes=32))
    unit = comm.open_unit(case.plan, label="overlapping")
    shards = case.shards()
    unit.reduce(case.grads(0), 2.0)
    unit.gather(shards)
    comm.barrier()
    case.expect_full(unit.wait_gather(), 0)
    unit.free()
    case.expect_reduced(unit.wait_reduce(), 0, 2.0)
    unit.close()


def check_odd_units(comm: Communicator) -> None:
    """Units without parameters, with frozen or empty ones only, do all that others do."""
    n, f32 = len(comm.ranks), "float32"
    rows = chunk_boxes((n, 2), 0, n)
    frozen = ParamSpec("frozen", (n, 2), rows, f32, f32, f32, trainable=False)
    empty = ParamSpec("empty", (0, 3), chunk_boxes((0, 3), 0, n), f32, f32, f32)
    hollow = ParamSpec("hollow", (n, 0), chunk_boxes((n, 0), 0, n), f32, f32, f32)
    for params in ((), (frozen,), (empty,), (hollow, frozen, empty)):
        for threshold in (0, 1 << 40):
            plan = plan_unit(params, world_size=n, bucket_below_bytes=threshold)
            case = _Case(comm, plan)
            unit = comm.open_unit(plan, label="odd")
            shards = case.shards()
            for cycle in range(2):
                case.set_shards(shards, cycle)
                unit.gather(shards)
                case.expect_full(unit.wait_gather(), cycle)
                unit.free()
                unit.reduce(case.grads(cycle), 0.5)
                case.expect_reduced(unit.wait_reduce(), cycle, 0.5)
            unit.close()


def check_unit_of_views(comm: Communicator) -> None:
    """Shards and gradients needn't be contiguous, and may have another data type than planned."""
    for threshold in (0, 1 << 40):
        case = _Case(comm, make_plan(len(comm.ranks), bucket_below_bytes=threshold))
        unit = comm.open_unit(case.plan, label="views")
        for dtype in ("float32", "float64"):
            unit.gather([_strided(comm.ops, shard, dtype) for shard in case.shards()])
            case.expect_full(unit.wait_gather(), 0)
            unit.free()
            grads = [None if g is None else _strided(comm.ops, g, dtype) for g in case.grads(0)]
            unit.reduce(grads, 1.0)
            case.expect_reduced(unit.wait_reduce(), 0, 1.0)
        unit.close()


def _strided(ops: ArrayOps, array: Array, dtype: str) -> Array:
    """Return the same values, with gaps between the rows where there are rows."""
    shape = tuple(array.shape)
    memory = ops.empty((*shape[:-1], shape[-1] + 1), dtype)
    ops.fill_zero(memory)
    made = ops.box(memory, Box((0,) * len(shape), shape))
    ops.copy(made, array)
    return made


def check_gather_given_up(comm: Communicator) -> None:
    """A gather that nobody waited for may be freed, and the next one is right."""
    case = _Case(comm, make_plan(len(comm.ranks), bucket_below_bytes=0))
    unit = comm.open_unit(case.plan, label="given up")
    shards = case.shards()
    unit.gather(shards)
    unit.free()
    comm.barrier()
    case.set_shards(shards, 1)
    unit.gather(shards)
    case.expect_full(unit.wait_gather(), 1)
    unit.free()
    unit.close()


def check_unit_counts(comm: Communicator) -> None:
    """A unit's gather and its reduction count once each, with the bytes of their parameters."""
    n = len(comm.ranks)
    case = _Case(comm, make_plan(n, bucket_below_bytes=0))
    unit = comm.open_unit(case.plan, label="counted")
    shards, grads = case.shards(), case.grads(0)

    def use() -> None:
        unit.gather(shards)
        unit.wait_gather()
        unit.free()
        unit.reduce(grads, 1.0)
        unit.wait_reduce()

    trace, here = traced(comm, use)
    assert trace.counts() == {"all_gather": len(here), "reduce_scatter": len(here)}
    assert {event.label for event in trace.events} == {"counted"}
    gathered = reduced = 0
    for spec in case.plan.params:
        for index in here:
            held = spec.boxes[index].num_elements
            gathered += (spec.num_elements - held) * itemsize(spec.compute_dtype)
            reduced += spec.trainable * (n - 1) * held * itemsize(spec.reduce_dtype)
    assert trace.wire_bytes("all_gather") == gathered
    assert trace.wire_bytes("reduce_scatter") == reduced
    unit.close()


def check_direct_uncopied(comm: Communicator) -> None:
    """Big parameters, cut along dim 0 and padded at the end, are gathered without a copy."""
    n = len(comm.ranks)
    shapes = ((2 * n, 3), (2 * n + 1, 3), (1, 4))
    specs = [
        ParamSpec(str(shape), shape, chunk_boxes(shape, 0, n), "float32", "float32", "float32")
        for shape in shapes
    ]
    case = _Case(comm, plan_unit(specs, world_size=n, bucket_below_bytes=0))
    unit = comm.open_unit(case.plan, label="direct")
    shards = case.shards()

    def use() -> None:
        unit.gather(shards)
        unit.wait_gather()
        unit.free()

    trace, _ = traced(comm, use)
    assert trace.copied_bytes("all_gather") == 0
    unit.close()


def check_bad_unit_calls(comm: Communicator) -> None:
    """Wrong plans, shapes and orders of calls are refused; the unit stays usable."""
    n, ops = len(comm.ranks), comm.ops
    plan = make_plan(n + 1, bucket_below_bytes=0)
    fails(CommError, lambda: comm.open_unit(plan, label="another group's"), "another world size")
    case = _Case(comm, make_plan(n, bucket_below_bytes=0))
    unit: UnitChannel = comm.open_unit(case.plan, label="refusing")
    shards, grads = case.shards(), case.grads(0)
    odd = ops.empty((3, 1, 1), "float32")
    calls: dict[str, Callable[[], object]] = {
        "too few shards": lambda: unit.gather(shards[1:]),
        "odd shard": lambda: unit.gather([odd, *shards[1:]]),
        "too many gradients": lambda: unit.reduce([*grads, None], 1.0),
        "odd gradient": lambda: unit.reduce([odd, *grads[1:]], 1.0),
        "wait_reduce first": unit.wait_reduce,
        "wait_gather first": unit.wait_gather,
    }
    unit.free()  # of nothing is allowed
    for name, call in calls.items():
        fails(CommError, call, name)
    unit.reduce(grads, 1.0)
    fails(CommError, lambda: unit.reduce(grads, 1.0), "a second reduction")
    case.expect_reduced(unit.wait_reduce(), 0, 1.0)
    unit.gather(shards)
    fails(CommError, lambda: unit.gather(shards), "a second gather")
    case.expect_full(unit.wait_gather(), 0)
    case.expect_full(unit.wait_gather(), 0)
    unit.free()
    unit.free()
    fails(CommError, unit.wait_gather, "wait_gather after free")
    unit.close()
    unit.free()
    for call in (lambda: unit.gather(shards), unit.wait_gather, lambda: unit.reduce(grads, 1.0)):
        assert "was closed" in str(fails(CommError, call, "a closed unit"))


def check_different_plans(comm: Communicator) -> None:
    """Ranks that open different units are told so."""
    plan = make_plan(len(comm.ranks), bucket_below_bytes=comm.index)
    other = UnitPlan(plan.params[comm.index :], plan.world_size, (), ())
    error = fails(MismatchError, lambda: comm.open_unit(other, label="odd"), "different plans")
    assert "odd" in str(error)
    assert all(f"rank {rank}:" in str(error) for rank in comm.ranks)


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_unit_cycles,
    check_shards_after_gather,
    check_units_in_flight,
    check_gather_while_reducing,
    check_gather_given_up,
    check_odd_units,
    check_unit_of_views,
    check_unit_counts,
    check_direct_uncopied,
    check_bad_unit_calls,
)
BREAKING: tuple[Callable[[Communicator], None], ...] = (check_different_plans,)
