"""What every transport must do: checks that take a communicator, on all ranks of a group.

    CHECKS      leave the group usable; run one after the other on one communicator
    BREAKING    end with an error by intent; each needs a group of its own, of at least 2 ranks

A check raises AssertionError. It runs on threads and in processes, with any framework: values go
in and out through numpy and `ArrayOps`. A new transport is done when

    run_threads(check_communicator, 8)

(or the same in processes) passes, and every check of `BREAKING` that applies to it.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from hp_comm.errors import CommError, CommTimeoutError
from hp_comm.testing import unit_conformance
from hp_comm.testing.expectation import expect, fails, traced
from hp_comm.testing.values import Floats, numbers, put, total
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm.ports import ArrayOps, Communicator, ReduceOp

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8")
FEW_DTYPES = ("float32", "int64")
MANY_RANKS = 8
"""With more ranks than this, fewer data types and lengths are tried."""

FOLDS: dict[ReduceOp, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}
MAX_PRODUCT_RANKS = 3
"""5 ** 3 is the last power of the largest number that fits one byte, with its sign."""

MAX_BYTE_RANKS = 25
"""25 * 5 is the last sum of the largest number that does."""

SHORT_S = 0.5
"""Time-out of a wait that is to fail, in seconds."""

LIMIT_S = 15.0
"""When a wait that fails must have said so, in seconds, on a busy machine."""


def check_communicator(comm: Communicator) -> list[str]:
    """Run every check that leaves the group usable, and return their names.

    Args:
        comm: Of a fresh group; every rank calls this.

    Raises:
        AssertionError: A check failed.

    Example:
        >>> from hp_comm.testing import run_threads
        >>> "check_all_gather" in run_threads(check_communicator, 1)[0]
        True
    """
    for check in CHECKS:
        check(comm)
    return [check.__name__ for check in CHECKS]


def check_facts(comm: Communicator) -> None:
    """The group tells who is in it."""
    assert len(set(comm.ranks)) == len(comm.ranks)
    assert 0 <= comm.index < len(comm.ranks)
    assert comm.name
    assert comm.transport
    found = comm.all_gather_bytes(repr((comm.ranks, comm.index)).encode())
    assert found == [repr((comm.ranks, index)).encode() for index in range(len(comm.ranks))]


def check_all_gather(comm: Communicator) -> None:
    """Parts are concatenated by group index, in every data type and length."""
    n = len(comm.ranks)
    for dtype in (*_dtypes(comm), "bool"):
        for length in _lengths(n):
            parts = [numbers((length,), rank) % 2 for rank in range(n)]
            output = comm.ops.empty((length * n,), dtype)
            comm.all_gather_into(output, put(comm.ops, parts[comm.index], dtype))
            expect(comm.ops, output, np.concatenate(parts), dtype, f"all_gather {dtype} {length}")


def check_shapes(comm: Communicator) -> None:
    """Arrays of any number of dims travel as they lie."""
    n, ops = len(comm.ranks), comm.ops
    parts = [numbers((2, 3), rank) for rank in range(n)]
    output = ops.empty((n, 2, 3), "float32")
    comm.all_gather_into(output, put(ops, parts[comm.index], "float32"))
    expect(ops, output, np.stack(parts), "float32", "all_gather of 2 dims")
    own = ops.empty((3, 2), "float32")
    comm.reduce_scatter_into(own, output)
    wanted = n * parts[comm.index].reshape(3, 2)
    expect(ops, own, wanted, "float32", "reduce_scatter of 3 dims")


def check_reduce_scatter(comm: Communicator) -> None:
    """Every rank gets its part of the fold, for every operation; the source stays."""
    n, ops = len(comm.ranks), comm.ops
    for dtype, op in _reductions(comm):
        for length in _lengths(n):
            sources = [numbers((n * length,), rank) for rank in range(n)]
            source = put(ops, sources[comm.index], dtype)
            output = ops.empty((length,), dtype)
            comm.reduce_scatter_into(output, source, op=op)
            part = slice(comm.index * length, (comm.index + 1) * length)
            wanted = _fold([one[part] for one in sources], op, dtype)
            what = f"reduce_scatter {op} {dtype} {length}"
            expect(ops, output, wanted, dtype, what, exact=op != "avg")
            expect(ops, source, sources[comm.index], dtype, f"source of {what}")


def check_all_reduce(comm: Communicator) -> None:
    """Every rank gets the fold, for every operation."""
    n, ops = len(comm.ranks), comm.ops
    for dtype, op in _reductions(comm):
        for length in _lengths(n):
            inputs = [numbers((length, 2), rank) for rank in range(n)]
            array = put(ops, inputs[comm.index], dtype)
            comm.all_reduce(array, op=op)
            wanted = _fold(inputs, op, dtype)
            what = f"all_reduce {op} {dtype} {length}"
            expect(ops, array, wanted, dtype, what, exact=op != "avg")


def check_bool(comm: Communicator) -> None:
    """The largest of booleans is "any", the smallest is "all"."""
    n = len(comm.ranks)
    rows = np.array([[rank == 0, True, False, rank != 0] for rank in range(n)], np.float64)
    folds: tuple[tuple[ReduceOp, Floats], ...] = (("max", rows.max(0)), ("min", rows.min(0)))
    for op, wanted in folds:
        array = put(comm.ops, rows[comm.index], "bool")
        comm.all_reduce(array, op=op)
        expect(comm.ops, array, wanted, "bool", f"all_reduce {op} of bool")


def check_broadcast(comm: Communicator) -> None:
    """Every rank gets the source's array, whoever that is."""
    n, ops = len(comm.ranks), comm.ops
    for source in sorted({0, n // 2, n - 1}):
        for dtype in ("float32", "int64", "bool"):
            array = put(ops, numbers((7, 3), comm.index) % 2, dtype)
            comm.broadcast(array, source=source)
            expect(ops, array, numbers((7, 3), source) % 2, dtype, f"broadcast from {source}")


def check_barrier(comm: Communicator) -> None:
    """Nobody leaves before the last one came."""
    if comm.index == len(comm.ranks) - 1:
        time.sleep(0.05)
    entered = time.monotonic()
    comm.barrier()
    own = json.dumps([entered, time.monotonic()]).encode()
    times = [json.loads(raw) for raw in comm.all_gather_bytes(own)]
    assert max(entry for entry, _ in times) <= min(leave for _, leave in times)


def check_bytes(comm: Communicator) -> None:
    """Values of any length reach everybody, also empty and very different ones."""
    n = len(comm.ranks)
    one_long = [(1 << 20) * (r == n // 2) for r in range(n)]
    mixed = [70_000 // (r + 1) for r in range(n)]
    for lengths in ([0] * n, [r % 3 for r in range(n)], mixed, one_long):
        values = [bytes([rank]) * length for rank, length in enumerate(lengths)]
        assert comm.all_gather_bytes(values[comm.index]) == values


def check_async(comm: Communicator) -> None:
    """Calls that were started together may be waited for in any order, and more than once."""
    n, ops = len(comm.ranks), comm.ops
    sources = [put(ops, numbers((8,), comm.index, i), "float32") for i in range(3)]
    outputs = [ops.empty((8 * n,), "float32") for _ in sources]
    works = [
        comm.all_gather_into(output, source, async_op=True)
        for output, source in zip(outputs, sources, strict=True)
    ]
    array = put(ops, numbers((4,), comm.index), "int64")
    works.append(comm.all_reduce(array, async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()
        assert work.is_completed()
        work.wait(1.0)
    for i, output in enumerate(outputs):
        wanted = np.concatenate([numbers((8,), rank, i) for rank in range(n)])
        expect(ops, output, wanted, "float32", f"asynchronous all_gather {i}")
    expect(ops, array, total((4,), range(n)), "int64", "asynchronous all_reduce")


def check_bad_calls(comm: Communicator) -> None:
    """What can't work is refused before anything is sent: the group stays usable."""
    n, ops = len(comm.ranks), comm.ops
    three, whole = ops.empty((3,), "float32"), ops.empty((3 * n,), "float32")
    striped = ops.box(ops.empty((4, 4), "float32"), Box((0, 0), (4, 2)))
    flags = ops.empty((3,), "bool")
    calls: dict[str, Callable[[], object]] = {
        "too short": lambda: comm.all_gather_into(ops.empty((3 * n - 1,), "float32"), three),
        "too long": lambda: comm.reduce_scatter_into(three, ops.empty((3 * n + 1,), "float32")),
        "two types": lambda: comm.all_gather_into(ops.empty((3 * n,), "float64"), three),
        "not contiguous": lambda: comm.all_reduce(striped),
        "unknown": lambda: comm.reduce_scatter_into(three, whole, op=cast("ReduceOp", "median")),
        "sum of booleans": lambda: comm.all_reduce(flags),
        "nobody": lambda: comm.broadcast(three, source=n),
        "negative": lambda: comm.broadcast(three, source=-1),
        "half": lambda: comm.broadcast(three, source=cast("int", 0.5)),
    }
    for name, call in calls.items():
        fails(CommError, call, name)
    array = put(ops, numbers((3,), comm.index), "float32")
    comm.all_reduce(array)
    expect(ops, array, total((3,), range(n)), "float32", "all_reduce after refused calls")


def check_counts(comm: Communicator) -> None:
    """A trace counts every call once, with the bytes that its head states."""
    n, ops = len(comm.ranks), comm.ops
    part, whole = ops.empty((6,), "float32"), ops.empty((6 * n,), "float32")
    ops.fill_zero(part)
    ops.fill_zero(whole)

    def use_all() -> None:
        comm.all_gather_into(whole, part)
        comm.reduce_scatter_into(part, whole)
        comm.all_reduce(part)
        comm.broadcast(part, source=0)
        comm.barrier()

    trace, here = traced(comm, use_all)
    size_bytes = 6 * 4
    assert trace.counts() == dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"), len(here)
    )
    assert trace.wire_bytes("all_gather") == len(here) * (n - 1) * size_bytes
    assert trace.wire_bytes("reduce_scatter") == len(here) * (n - 1) * size_bytes
    assert trace.wire_bytes("all_reduce") == len(here) * math.ceil(2 * (n - 1) * size_bytes / n)
    assert trace.wire_bytes("broadcast") == len([r for r in here if r]) * size_bytes
    counted = [event for event in trace.events if event.group]  # others are copies
    assert {(event.group, event.transport) for event in counted} == {(comm.name, comm.transport)}


def check_time_out(comm: Communicator) -> None:
    """A wait for a rank that doesn't come ends, and names it."""
    absent = len(comm.ranks) - 1
    if comm.index == absent:
        time.sleep(2 * SHORT_S)
        return
    start = time.monotonic()
    error = fails(CommTimeoutError, lambda: comm.barrier(timeout_s=SHORT_S), "barrier")
    assert time.monotonic() - start < LIMIT_S
    assert error.missing == (comm.ranks[absent],), error
    assert error.operation == "barrier"
    assert error.group == comm.name
    assert error.sequence > 0


def check_different_calls(comm: Communicator) -> None:
    """Ranks that are at different calls are told so; not for transports that can't tell."""
    array = put(comm.ops, numbers((3,), 0), "float32")
    call: Callable[[], object] = comm.barrier if comm.index else lambda: comm.all_reduce(array)
    error = fails(CommError, call, "different calls")
    text = str(error)
    assert "barrier" in text, text
    assert "all_reduce" in text, text


def _supports(ops: ArrayOps, dtype: str) -> bool:
    try:
        ops.empty((1,), dtype)
    except CommError:
        return False
    return True


def _dtypes(comm: Communicator) -> list[str]:
    names = DTYPES if len(comm.ranks) <= MANY_RANKS else FEW_DTYPES
    return [name for name in names if _supports(comm.ops, name)]


def _lengths(num_ranks: int) -> tuple[int, ...]:
    return (1, 3, 1000) if num_ranks <= MANY_RANKS else (1, 3)


def _reductions(comm: Communicator) -> list[tuple[str, ReduceOp]]:
    """Return data types and operations whose results are exact on so many ranks."""
    n = len(comm.ranks)
    return [
        (dtype, op)
        for dtype in _dtypes(comm)
        for op in FOLDS
        if (op != "prod" or n <= MAX_PRODUCT_RANKS)
        and (op in ("max", "min") or n <= MAX_BYTE_RANKS or not dtype.endswith("int8"))
    ]


def _fold(arrays: list[Floats], op: ReduceOp, dtype: str) -> Floats:
    folded: Floats = FOLDS[op].reduce(np.stack(arrays))
    if op == "avg":
        folded = folded / len(arrays)
    return np.trunc(folded) if "int" in dtype else folded


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_facts,
    check_all_gather,
    check_shapes,
    check_reduce_scatter,
    check_all_reduce,
    check_bool,
    check_broadcast,
    check_barrier,
    check_bytes,
    check_async,
    check_bad_calls,
    check_counts,
    *unit_conformance.CHECKS,
)
BREAKING: tuple[Callable[[Communicator], None], ...] = (
    check_time_out,
    check_different_calls,
    *unit_conformance.BREAKING,
)
