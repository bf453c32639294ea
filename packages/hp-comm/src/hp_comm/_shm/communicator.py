"""The collectives of a group whose ranks share memory.

A call that isn't asynchronous runs its steps (collective.py) to the end; an asynchronous one up
to the first pause, and `wait` does the rest. Before a call starts, all earlier ones are run up to
their last round at least, so that rounds have the same numbers on all ranks, whenever each of
them calls `wait`. At most two rounds are under way.

After an error the ranks don't agree any more on what comes next, so the group refuses all calls.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import deque
from typing import TYPE_CHECKING

from hp_comm._shm.board import Board, encode_text, mismatch
from hp_comm._shm.collective import Collectives, Steps
from hp_comm._shm.ring import GradRing
from hp_comm._shm.rounds import Call, Rounds
from hp_comm._shm.unit import ShmUnit, UnitContext, unit_segment_bytes
from hp_comm._shm.watch import Watch
from hp_comm.errors import CommError, TransportError
from hp_comm.plan import itemsize
from hp_comm.trace import note_collective
from hp_comm.verify import check_all_gather, check_array, check_reduce_scatter, check_source
from hp_comm.wire import all_reduce_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm._shm.handover import Handover
    from hp_comm._shm.kernel import Mapping
    from hp_comm._shm.seat import Seat
    from hp_comm._shm.segment import Segment
    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, UnitChannel, Work

_MAX_VALUE_BYTES = 2**32 - 1
_MAX_UNDER_WAY = 2


class ShmWork:
    """A collective that was started; implements `hp_comm.ports.Work`."""

    def __init__(self, queue: _Queue, steps: Steps) -> None:
        self._queue = queue
        self.steps = steps
        self.number = 0
        self.is_last = False
        self.is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the output may be read; runs earlier collectives of the group first."""
        self._queue.finish(self, timeout_s)

    def is_completed(self) -> bool:
        """Tell, without waiting, whether `wait` would return at once."""
        return self._queue.has_finished(self)


class _Queue:
    """The group's collectives that were started and aren't finished, in their order."""

    def __init__(self, rounds: Rounds, watch: Watch) -> None:
        self._rounds = rounds
        self._watch = watch
        self._works: deque[ShmWork] = deque()

    def start(self, steps: Steps) -> ShmWork:
        """Run the steps up to their first pause, earlier calls as far as they have to be."""
        while self._works and not (len(self._works) < _MAX_UNDER_WAY and self._works[0].is_last):
            self.finish(self._works[0], None)
        work = ShmWork(self, steps)
        self._works.append(work)
        self._step(work)
        return work

    def finish(self, work: ShmWork, timeout_s: float | None) -> None:
        """Run a call's steps to the end, and those of all earlier calls."""
        self._rounds.timeout_s = timeout_s
        try:
            while not work.is_done:
                self._watch.check()
                self._step(self._works[0])
        finally:
            self._rounds.timeout_s = None

    def has_finished(self, work: ShmWork) -> bool:
        """Tell whether a call is finished; runs steps that need no waiting."""
        while not work.is_done and self._rounds.has_arrived(self._works[0].number):
            self._watch.check()
            self._step(self._works[0])
        return work.is_done

    def _step(self, work: ShmWork) -> None:
        try:
            work.number, work.is_last = next(work.steps)
        except StopIteration:
            work.is_done = True
            self._works.remove(work)
        except BaseException as error:
            self._watch.give_up(f"the group can't be used after an earlier error: {error}")
            raise


class ShmCommunicator:
    """Implements `hp_comm.ports.Communicator` over shared memory.

    Args:
        seat: This process's place in the group.
        ops: The tensor operations.
        mapping: The group's segment.
        handover: The connections for later segments; closed with the group.
    """

    transport = "shm"

    def __init__(self, seat: Seat, ops: ArrayOps, mapping: Mapping, handover: Handover) -> None:
        self.name = seat.name
        self.ranks = seat.ranks
        self.index = seat.index
        self.ops = ops
        self._seat = seat
        self._handover = handover
        board = Board(mapping, seat.num_ranks, seat.index)
        self._watch = Watch(seat, board, handover)
        rounds = Rounds(seat, board, ops, self._watch)
        self._queue = _Queue(rounds, self._watch)
        self._make = Collectives(seat, rounds, ops)
        self._ring = GradRing(seat, board.counters, self._watch)
        self._texts: dict[tuple[str, str, int], bytes] = {}
        weakref.finalize(self, handover.close)
        self._num_calls = 0
        self._num_units = 0

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate every rank's `source` in `output`, by group index."""
        check_all_gather(self.ops, output, source, len(self.ranks))
        call = self._call("all_gather", source)
        self._note("all_gather", _num_bytes(call) * (len(self.ranks) - 1))
        return self._run(self._make.all_gather(call, output, source), async_op)

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` elementwise and keep this rank's part in `output`."""
        check_reduce_scatter(self.ops, output, source, op, len(self.ranks))
        call = self._call("reduce_scatter", source, op)
        num_bytes = _num_bytes(call) // len(self.ranks) * (len(self.ranks) - 1)
        self._note("reduce_scatter", num_bytes)
        return self._run(self._make.reduce_scatter(call, output, source, op), async_op)

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array` elementwise, in place, on every rank."""
        check_array(self.ops, array, op)
        call = self._call("all_reduce", array, op)
        self._note("all_reduce", all_reduce_bytes(_num_bytes(call), len(self.ranks)))
        return self._run(self._make.all_reduce(call, array, op), async_op)

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        check_array(self.ops, array, "max")
        check_source(source, len(self.ranks))
        call = self._call("broadcast", array, f"from {source}")
        self._note("broadcast", 0 if source == self.index else _num_bytes(call))
        return self._run(self._make.broadcast(call, array, source), async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank of the group has called this."""
        call = self._call("barrier")
        self._note("barrier", 0)
        self._queue.finish(self._queue.start(self._make.barrier(call)), timeout_s)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes, by group index."""
        if len(value) > _MAX_VALUE_BYTES:
            raise CommError(
                f"all_gather_bytes was given {len(value)} bytes. Pass at most "
                f"{_MAX_VALUE_BYTES}, or an array."
            )
        return self._gather_bytes(self._call("all_gather_bytes"), value)

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit.

        Raises:
            CommError: The plan is for another number of ranks.
            MismatchError: The ranks have different plans.
            TransportError: There is no memory or descriptor left; raised on every rank.
        """
        if plan.world_size != len(self.ranks):
            raise CommError(
                f"unit {label!r} was planned for {plan.world_size} ranks and opened on group "
                f"{self.name!r} of {len(self.ranks)}. Plan it with that world_size."
            )
        call = self._call(f"open_unit {label}")
        self._compare_plans(call, plan, label)
        self._num_units += 1
        context = UnitContext(self._seat, self.ops, self._watch, self._ring)
        made: list[UnitChannel] = []

        def make() -> None:
            with_slots = self._ring.area_bytes_for(plan)
            if with_slots > self._ring.area_bytes:
                self._ring.use(self._share(self._ring.num_bytes_for(with_slots)), with_slots)
            segment = self._share(unit_segment_bytes(plan))
            made.append(ShmUnit(context, plan, label, number=self._num_units, segment=segment))

        self._do_together(call, make)
        return made[0]

    def close(self) -> None:
        """Close the connections and refuse further calls; arrays handed out stay readable."""
        self._watch.give_up(f"group {self.name!r} was closed. Make another communicator.")
        self._handover.close()

    def _share(self, num_bytes: int) -> Segment:
        return self._handover.share(num_bytes, self._seat.timeout_s)

    def _compare_plans(self, call: Call, plan: UnitPlan, label: str) -> None:
        digest = hashlib.sha256(repr(plan).encode()).hexdigest()[:16]
        text = f"open_unit {label!r} with {len(plan.params)} parameters, plan {digest}"
        texts = [raw.decode() for raw in self._gather_bytes(call, text.encode())]
        if len(set(texts)) > 1:
            error = mismatch(self._seat, texts)
            self._watch.give_up(f"the group can't be used after an earlier error: {error}")
            raise error

    def _do_together(self, call: Call, make: Callable[[], None]) -> None:
        """Run something that may fail on some ranks, and raise on all if it did on any."""
        problem = ""
        try:
            make()
        except OSError as error:
            problem = str(error) or type(error).__name__
        answers = [raw.decode() for raw in self._gather_bytes(call, problem.encode())]
        if any(answers):
            reasons = "; ".join(
                f"rank {rank}: {answer}"
                for rank, answer in zip(self.ranks, answers, strict=True)
                if answer
            )
            self._watch.give_up(f"the group has no memory for a unit: {reasons}. Start again.")
            raise TransportError(
                f"{call.operation} on group {self.name!r} needs shared memory that can't be had: "
                f"{reasons}. Free memory or descriptors, or use another transport."
            )

    def _gather_bytes(self, call: Call, value: bytes) -> list[bytes]:
        parts: list[list[bytes]] = [[] for _ in self.ranks]
        self._run(self._make.gather_bytes(call, value, parts), False)
        return [b"".join(pieces) for pieces in parts]

    def _call(self, operation: str, array: Array | None = None, detail: str = "") -> Call:
        self._watch.check()
        self._num_calls += 1
        count, dtype = 0, ""
        if array is not None:
            count, dtype = math.prod(array.shape), self.ops.dtype_of(array)
        key = (f"{operation} {detail}", dtype, count)
        text = self._texts.get(key)
        if text is None:
            if len(self._texts) > 1000:  # noqa: PLR2004  # sizes that change with every call
                self._texts.clear()
            text = encode_text(f"{key[0].strip()} {count} {dtype}" if dtype else key[0])
            self._texts[key] = text
        return Call(operation, self._num_calls, text, dtype, count)

    def _run(self, steps: Steps, async_op: bool) -> Work | None:
        work = self._queue.start(steps)
        if async_op:
            return work
        self._queue.finish(work, None)
        return None

    def _note(self, kind: str, wire_bytes: int) -> None:
        note_collective(
            kind,
            group=self.name,
            transport=self.transport,
            wire_bytes=wire_bytes,
            sequence=self._num_calls,
        )


def _num_bytes(call: Call) -> int:
    return call.count * itemsize(call.dtype)
