"""Ranks as threads of one process, meeting in memory: 64 ranks in seconds, no framework.

Everything is deterministic but the interleaving: sums are taken in the order of the group index.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hp_comm.collective_unit import CollectiveUnit
from hp_comm.errors import CommTimeoutError, MismatchError
from hp_comm.testing.numpy_ops import NumpyOps
from hp_comm.trace import note_collective
from hp_comm.verify import check_all_gather, check_array, check_reduce_scatter, check_source
from hp_comm.wire import all_reduce_bytes, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, UnitChannel, Work

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 30.0


@dataclass
class _Call:
    keys: dict[int, object] = field(default_factory=dict)
    values: dict[int, object] = field(default_factory=dict)
    left: int = 0


class Meeting:
    """Where the threads of one group exchange values, call by call.

    Args:
        num_ranks: How many threads meet.
        timeout_s: How long a thread waits for the others, in seconds.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._calls: dict[int, _Call] = {}
        self._changed = threading.Condition()

    def exchange(self, index: int, number: int, key: str, value: object) -> list[object]:
        """Give a value and return everybody's, by group index.

        Args:
            index: Who gives.
            number: Of the exchange, counted by each thread alike.
            key: What the exchange is about; all must say the same.
            value: What is given.

        Raises:
            CommTimeoutError: Somebody didn't come.
            MismatchError: Somebody came for something else.
        """
        with self._changed:
            call = self._calls.setdefault(number, _Call())
            call.keys[index], call.values[index] = key, value
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(call.keys) == self.num_ranks, self.timeout_s)
            if len(call.keys) < self.num_ranks:
                missing = tuple(set(range(self.num_ranks)) - call.keys.keys())
                raise CommTimeoutError(key, "threads", number, missing, self.timeout_s)
            if len(set(call.keys.values())) > 1:
                raise MismatchError(
                    f"ranks are at different calls: {dict(sorted(call.keys.items()))}. Make the "
                    f"same calls in the same order on every rank."
                )
            call.left += 1
            if call.left == self.num_ranks:
                del self._calls[number]
            return [call.values[rank] for rank in range(self.num_ranks)]


class _Done:
    """The work of a collective that is over when the call returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Tell that it is over."""
        return True


class ThreadCommunicator:
    """One thread's seat in a group; implements `hp_comm.ports.Communicator`.

    Args:
        meeting: The group.
        index: This thread's group index.
        ops: The tensor operations; numpy's if left out.
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
        own = nbytes(self.ops, source)
        self._note("all_gather", own * (len(self.ranks) - 1))
        parts = self.ops.reshape(output, (len(self.ranks), *source.shape))
        given = self._exchange("all_gather", source)
        for part, array in zip(parts, given, strict=True):  # type: ignore[call-overload]  # numpy
            self.ops.copy(part, array)
        return self._end(async_op)

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` and keep this rank's part in `output`."""
        check_reduce_scatter(self.ops, output, source, op, len(self.ranks))
        self._note("reduce_scatter", nbytes(self.ops, output) * (len(self.ranks) - 1))
        given = self._exchange(f"reduce_scatter {op}", source)
        shape = (len(self.ranks), *output.shape)
        self._fold(output, [self.ops.reshape(a, shape)[self.index] for a in given], op)  # type: ignore[index]  # numpy
        return self._end(async_op)

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array`, in place, on every rank."""
        check_array(self.ops, array, op)
        self._note("all_reduce", all_reduce_bytes(nbytes(self.ops, array), len(self.ranks)))
        copy = self.ops.empty(array.shape, self.ops.dtype_of(array))
        self.ops.copy(copy, array)
        self._fold(array, self._exchange(f"all_reduce {op}", copy), op)
        return self._end(async_op)

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        check_array(self.ops, array, "sum")
        check_source(source, len(self.ranks))
        self._note("broadcast", 0 if source == self.index else nbytes(self.ops, array))
        given = self._exchange(f"broadcast from {source}", array)
        if source != self.index:
            self.ops.copy(array, given[source])
        return self._end(async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every thread of the group has called this."""
        self._note("barrier", 0)
        self._exchange("barrier", None)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every thread's bytes, by group index."""
        return [bytes(item) for item in self._exchange("all_gather_bytes", value)]  # type: ignore[call-overload]  # bytes

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit."""
        return CollectiveUnit(self, plan, label)

    def close(self) -> None:
        """Do nothing: the memory is Python's."""

    def _fold(self, target: Array, arrays: Sequence[Array], op: ReduceOp) -> None:
        self.ops.copy(target, arrays[0])
        for array in arrays[1:]:
            self.ops.combine(target, array, op)
        if op == "avg":
            self.ops.scale(target, 1.0 / len(arrays))

    def _exchange(self, key: str, value: object) -> list[Array]:
        self._sequence += 1
        return self._meeting.exchange(self.index, self._sequence, key, value)  # type: ignore[return-value]  # arrays

    def _end(self, async_op: bool) -> Work | None:
        """Wait until nobody reads this rank's arrays any more."""
        self._exchange("end", None)
        return _Done() if async_op else None

    def _note(self, kind: str, wire_bytes: int) -> None:
        note_collective(
            kind,
            group=self.name,
            transport=self.transport,
            wire_bytes=wire_bytes,
            sequence=self._sequence + 1,
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
        timeout_s: How long a thread waits for the others in one call, in seconds.
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

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(world_size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 2 * timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise min(errors.values(), key=lambda error: isinstance(error, CommTimeoutError))
    hanging = [index for index in range(world_size) if index not in results]
    if hanging:
        raise CommTimeoutError("run_threads", "threads", 0, tuple(hanging), 2 * timeout_s)
    return [results[index] for index in range(world_size)]
