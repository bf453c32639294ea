"""Ranks as threads of one process, meeting in memory: 64 ranks in seconds, no framework.

Everything is deterministic but the interleaving: sums are taken in the order of the group index.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from hp_comm.collective_unit import open_unit
from hp_comm.errors import CommTimeoutError, MismatchError
from hp_comm.local import DoneWork
from hp_comm.testing.numpy_ops import NumpyOps
from hp_comm.trace import note_collective
from hp_comm.verify import (
    check_all_gather,
    check_array,
    check_reduce_scatter,
    check_source,
    check_value,
)
from hp_comm.wire import all_reduce_bytes, nbytes
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, UnitChannel, Work

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 30.0


@dataclass
class _Call:
    keys: dict[int, str] = field(default_factory=dict)
    values: dict[int, object] = field(default_factory=dict)
    num_left: int = 0


class Meeting:
    """Where the threads of one group exchange values, call by call.

    Args:
        num_ranks: How many threads meet.
        timeout_s: How long a thread waits for the others, in seconds.

    Example:
        >>> Meeting(1, timeout_s=1.0).exchange(0, (1, "start"), "greeting", "hello")
        ['hello']
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._calls: dict[tuple[int, str], _Call] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def exchange(
        self,
        index: int,
        place: tuple[int, str],
        key: str,
        value: object,
        timeout_s: float | None = None,
    ) -> list[object]:
        """Give a value and return everybody's, by group index.

        Args:
            index: Who gives.
            place: Which exchange it is: the number of the call and a part of it.
            key: What the call is; all must say the same.
            value: What is given.
            timeout_s: How long to wait, in seconds; None: the group's.

        Raises:
            CommTimeoutError: Somebody didn't come in time, or has ended.
            MismatchError: Somebody came for something else.
        """
        start = time.monotonic()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._changed:
            call = self._calls.setdefault(place, _Call())
            call.keys[index], call.values[index] = key, value
            if len(call.keys) == self.num_ranks:
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._is_settled(call), limit_s)
            missing = set(range(self.num_ranks)) - call.keys.keys()
            if missing:
                waited_s = limit_s
                if missing & self._gone:
                    missing &= self._gone  # the others may still come
                    waited_s = round(min(limit_s, time.monotonic() - start), 3)
                operation, _, _ = key.partition(" ")
                named = tuple(sorted(missing))
                raise CommTimeoutError(operation, "threads", place[0], named, waited_s)
            self._leave(place, call)
            if len(set(call.keys.values())) > 1:
                raise MismatchError(
                    f"ranks are at different calls, all number {place[0]} of group 'threads': "
                    f"{dict(sorted(call.keys.items()))}. Make the same calls in the same order on "
                    f"every rank."
                )
            return [call.values[rank] for rank in range(self.num_ranks)]

    def leave(self, index: int) -> None:
        """Tell the others that this thread has ended: nobody needs to wait for it."""
        with self._changed:
            self._gone.add(index)
            self._changed.notify_all()

    def _is_settled(self, call: _Call) -> bool:
        """Tell whether everybody came, or somebody never will."""
        return len(call.keys) == self.num_ranks or not self._gone <= call.keys.keys()

    def _leave(self, place: tuple[int, str], call: _Call) -> None:
        call.num_left += 1
        if call.num_left == self.num_ranks:
            del self._calls[place]


class ThreadCommunicator:
    """One thread's seat in a group; implements `hp_comm.ports.Communicator`.

    Args:
        meeting: The group.
        index: This thread's group index.
        ops: The tensor operations; numpy's if left out.

    Example:
        >>> ThreadCommunicator(Meeting(1, timeout_s=1.0), index=0).all_gather_bytes(b"mine")
        [b'mine']
    """

    name = "threads"
    transport = "thread"

    def __init__(self, meeting: Meeting, index: int, ops: ArrayOps | None = None) -> None:
        self.ranks = tuple(range(meeting.num_ranks))
        self.index = index
        self.ops: ArrayOps = ops or NumpyOps()
        self._meeting = meeting
        self._sequence = 0

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate every rank's `source` in `output`, by group index."""
        check_all_gather(self.ops, output, source, len(self.ranks))
        self._start("all_gather", nbytes(self.ops, source) * (len(self.ranks) - 1))
        for rank, given in enumerate(self._exchange("all_gather", source)):
            part = self._part(output, rank)
            self.ops.copy(part, self.ops.reshape(given, part.shape))
        return self._end("all_gather", async_op)

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` and keep this rank's part in `output`."""
        check_reduce_scatter(self.ops, output, source, op, len(self.ranks))
        self._start("reduce_scatter", nbytes(self.ops, output) * (len(self.ranks) - 1))
        given = self._exchange("reduce_scatter", source, op)
        own = [self.ops.reshape(self._part(array, self.index), output.shape) for array in given]
        self._fold(output, own, op)
        return self._end("reduce_scatter", async_op)

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array`, in place, on every rank."""
        check_array(self.ops, array, op)
        self._start("all_reduce", all_reduce_bytes(nbytes(self.ops, array), len(self.ranks)))
        copy = self.ops.empty(array.shape, self.ops.dtype_of(array))
        self.ops.copy(copy, array)
        given = self._exchange("all_reduce", copy, op)
        self._fold(array, [self.ops.reshape(other, array.shape) for other in given], op)
        return self._end("all_reduce", async_op)

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        check_array(self.ops, array)
        check_source(source, len(self.ranks))
        self._start("broadcast", 0 if source == self.index else nbytes(self.ops, array))
        given = self._exchange("broadcast", array, f"from {source}")
        if source != self.index:
            self.ops.copy(array, self.ops.reshape(given[source], array.shape))
        return self._end("broadcast", async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every thread of the group has called this."""
        self._start("barrier", 0)
        self._meeting.exchange(self.index, (self._sequence, "start"), "barrier", None, timeout_s)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every thread's bytes, by group index; set-up traffic, no trace counts it."""
        check_value(value)
        self._sequence += 1
        place = self._sequence, "start"
        given = self._meeting.exchange(self.index, place, "all_gather_bytes", value)
        return [cast("bytes", other) for other in given]

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit.

        Raises:
            CommError: The plan is for another number of ranks.
            MismatchError: The ranks have different plans.
        """
        return open_unit(self, plan, label)

    def close(self) -> None:
        """Do nothing: the memory is Python's."""

    def _part(self, whole: Array, rank: int) -> Array:
        """Return one rank's part of a contiguous array, as a 1-D view."""
        length = math.prod(whole.shape)
        flat, part = self.ops.reshape(whole, (length,)), length // len(self.ranks)
        return self.ops.box(flat, Box((part * rank,), (part,)))

    def _fold(self, target: Array, arrays: Sequence[Array], op: ReduceOp) -> None:
        self.ops.copy(target, arrays[0])
        for array in arrays[1:]:
            self.ops.combine(target, array, op)
        if op == "avg":
            self.ops.scale(target, 1.0 / len(arrays))

    def _exchange(self, operation: str, array: Array, detail: str = "") -> list[Array]:
        dtype, length = self.ops.dtype_of(array), math.prod(array.shape)
        key = f"{operation} {detail} of {length} {dtype}".replace("  ", " ")
        given = self._meeting.exchange(self.index, (self._sequence, "start"), key, array)
        return [cast("Array", other) for other in given]

    def _end(self, operation: str, async_op: bool) -> Work | None:
        """Wait until nobody reads this rank's arrays any more."""
        self._meeting.exchange(self.index, (self._sequence, "end"), operation, None)
        return DoneWork() if async_op else None

    def _start(self, kind: str, wire_bytes: int) -> None:
        self._sequence += 1
        note_collective(
            kind,
            group=self.name,
            transport=self.transport,
            wire_bytes=wire_bytes,
            sequence=self._sequence,
        )


def run_threads(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ops: ArrayOps | None = None,
) -> list[T]:
    """Call `function(communicator, *args)` on threads and return the results by rank.

    Args:
        function: What every rank runs.
        world_size: Number of threads, at least 1.
        *args: Passed on.
        timeout_s: How long a thread waits for the others in one call, in seconds; the whole run
            may last twice as long.
        ops: The tensor operations; numpy's if left out.

    Raises:
        BaseException: What the first rank that failed raised; time-outs come last.

    Example:
        >>> run_threads(lambda comm: comm.all_gather_bytes(b"%d" % comm.index), 2)
        [[b'0', b'1'], [b'0', b'1']]
    """
    meeting = Meeting(world_size, timeout_s)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        try:
            results[index] = function(ThreadCommunicator(meeting, index, ops), *args)
        except BaseException as error:  # re-raised by the caller below
            errors[index] = error
        finally:
            meeting.leave(index)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(world_size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise min(list(errors.values()), key=lambda error: isinstance(error, CommTimeoutError))
    hanging = [index for index in range(world_size) if index not in results]
    if hanging:
        raise CommTimeoutError("run_threads", "threads", 0, tuple(hanging), 2 * timeout_s)
    return [results[index] for index in range(world_size)]
