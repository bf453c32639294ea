"""The steps of each collective: what is staged in which round, and who takes what.

Each is a generator that pauses once per round, when its own bytes are posted and the others' are
needed next. It says the round's number and whether it is the call's last.

    all_gather        stage own part; take everybody's
    reduce_scatter    stage one part per owner; fold own part of everybody
    all_reduce        short: stage all; fold everybody's. Long: stage all, fold own part; then
                      stage the folded part, take everybody's (2/n of the reading)
    broadcast         the source stages; the others take
    barrier           nothing

Folding goes by group index: the result is the same, bit by bit, on all ranks. Two numbers may be
swapped but not regrouped, so ranks 0 and 1 start from their own array and the others stage theirs.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING

from hp_comm._shm.board import STAGE_BYTES
from hp_comm.plan import itemsize
from hp_mesh import Box, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hp_comm._shm.rounds import Call, Rounds
    from hp_comm._shm.seat import Seat
    from hp_comm.ports import Array, ArrayOps, ReduceOp

Pause = tuple[int, bool]
Steps = Generator[Pause, None, None]

_SHORT_BYTES = 64 * 1024


class Collectives:
    """Makes the steps of calls on one group.

    Args:
        seat: This process's place in the group.
        rounds: The group's rounds.
        ops: The tensor operations.
    """

    def __init__(self, seat: Seat, rounds: Rounds, ops: ArrayOps) -> None:
        self._index = seat.index
        self._num_ranks = seat.num_ranks
        self._rounds = rounds
        self._ops = ops
        self._others = tuple(i for i in range(seat.num_ranks) if i != seat.index)

    def barrier(self, call: Call) -> Steps:
        """Meet once."""
        number = self._rounds.begin(call)
        self._rounds.post(number, call)
        yield number, True
        self._rounds.arrive(number, call)
        self._rounds.release(number)

    def all_gather(self, call: Call, output: Array, source: Array) -> Steps:
        """Concatenate every rank's `source` in `output`."""
        dtype, count = call.dtype, call.count
        whole, own = self._flat(output), self._flat(source)
        for start, length, is_last in _spans(count, STAGE_BYTES // itemsize(dtype)):
            number = self._rounds.begin(call)
            self._copy(self._stage(number, self._index, dtype, (0, length)), own, start, length)
            self._rounds.post(number, call)
            yield number, is_last
            self._rounds.arrive(number, call)
            if length:
                self._take_parts(whole, count, own, (number, dtype, start, length))
            self._rounds.release(number)

    def reduce_scatter(self, call: Call, output: Array, source: Array, op: ReduceOp) -> Steps:
        """Fold every rank's part for this rank into `output`."""
        dtype, count = call.dtype, call.count // self._num_ranks
        target, whole = self._flat(output), self._flat(source)
        most = STAGE_BYTES // (itemsize(dtype) * self._num_ranks)
        for start, length, is_last in _spans(count, most):
            number = self._rounds.begin(call)
            part_bytes = length * itemsize(dtype)
            for rank in self._staged_owners():
                place = self._stage(number, self._index, dtype, (rank * part_bytes, length))
                self._copy(place, whole, rank * count + start, length)
            self._rounds.post(number, call)
            yield number, is_last
            self._rounds.arrive(number, call)
            if length:
                offset_bytes = self._index * part_bytes
                cut = self._cut(target, start, length)
                if self._index < 2:  # noqa: PLR2004  # see the head
                    self._copy(cut, whole, self._index * count + start, length)
                self._fold(cut, op, (number, dtype, offset_bytes, length))
            self._rounds.release(number)

    def all_reduce(self, call: Call, array: Array, op: ReduceOp) -> Steps:
        """Fold every rank's array, in place."""
        dtype, count = call.dtype, call.count
        flat = self._flat(array)
        is_short = count * itemsize(dtype) <= _SHORT_BYTES
        for start, length, is_last in _spans(count, STAGE_BYTES // itemsize(dtype)):
            cut = self._cut(flat, start, length)
            if is_short:
                yield from self._all_reduce_short(call, cut, op, dtype)
            else:
                yield from self._all_reduce_long(call, cut, op, (dtype, is_last))

    def broadcast(self, call: Call, array: Array, source: int) -> Steps:
        """Overwrite the array by the source's."""
        dtype, count = call.dtype, call.count
        flat = self._flat(array)
        for start, length, is_last in _spans(count, STAGE_BYTES // itemsize(dtype)):
            number = self._rounds.begin(call)
            if source == self._index:
                self._copy(self._stage(number, source, dtype, (0, length)), flat, start, length)
            self._rounds.post(number, call)
            yield number, is_last
            self._rounds.arrive(number, call)
            if source != self._index and length:
                taken = self._stage(number, source, dtype, (0, length))
                self._ops.copy(self._cut(flat, start, length), taken)
            self._rounds.release(number)

    def gather_bytes(self, call: Call, value: bytes, parts: list[list[bytes]]) -> Steps:
        """Append every rank's bytes to its list in `parts`, piece by piece."""
        start, most = 0, 1
        while start < most:
            number = self._rounds.begin(call)
            piece = value[start : start + STAGE_BYTES]
            self._rounds.stage_bytes(number, self._index)[: len(piece)] = piece
            self._rounds.post(number, call, length=len(value))
            yield number, False
            self._rounds.arrive(number, call)
            lengths = [self._rounds.length(number, rank) for rank in range(self._num_ranks)]
            for rank, length in enumerate(lengths):
                held = self._rounds.stage_bytes(number, rank)[: max(0, length - start)]
                parts[rank].append(bytes(held))
            self._rounds.release(number)
            start, most = start + STAGE_BYTES, max(lengths)

    def _all_reduce_short(self, call: Call, cut: Array, op: ReduceOp, dtype: str) -> Steps:
        number, length = self._rounds.begin(call), cut.shape[0]
        if length:
            self._ops.copy(self._stage(number, self._index, dtype, (0, length)), cut)
        self._rounds.post(number, call)
        yield number, True
        self._rounds.arrive(number, call)
        if length:
            self._fold(cut, op, (number, dtype, 0, length))
        self._rounds.release(number)

    def _all_reduce_long(
        self, call: Call, cut: Array, op: ReduceOp, kind: tuple[str, bool]
    ) -> Steps:
        dtype, is_last = kind
        size = itemsize(dtype)
        bounds = [shard_bounds(cut.shape[0], self._num_ranks, i) for i in range(self._num_ranks)]
        number = self._rounds.begin(call)
        for rank in self._staged_owners():
            start, stop = bounds[rank]
            place = self._stage(number, self._index, dtype, (start * size, stop - start))
            self._copy(place, cut, start, stop - start)
        self._rounds.post(number, call)
        yield number, False
        self._rounds.arrive(number, call)
        start, stop = bounds[self._index]
        own = self._cut(cut, start, stop - start)
        if stop > start:
            self._fold(own, op, (number, dtype, start * size, stop - start))
        self._rounds.release(number)
        number = self._rounds.begin(call)
        self._copy(self._stage(number, self._index, dtype, (0, stop - start)), own, 0, stop - start)
        self._rounds.post(number, call)
        yield number, is_last
        self._rounds.arrive(number, call)
        for rank in self._others:
            start, stop = bounds[rank]
            taken = self._stage(number, rank, dtype, (0, stop - start))
            self._copy(self._cut(cut, start, stop - start), taken, 0, stop - start)
        self._rounds.release(number)

    def _take_parts(
        self, whole: Array, count: int, own: Array, piece: tuple[int, str, int, int]
    ) -> None:
        number, dtype, start, length = piece
        for rank in range(self._num_ranks):
            place = self._cut(whole, rank * count + start, length)
            if rank == self._index:
                self._copy(place, own, start, length)
            else:
                self._ops.copy(place, self._stage(number, rank, dtype, (0, length)))

    def _fold(self, target: Array, op: ReduceOp, piece: tuple[int, str, int, int]) -> None:
        """Fold the staged pieces of all ranks into `target`, which holds this rank's own."""
        number, dtype, offset_bytes, length = piece
        others: Iterable[int] = self._others
        if self._index >= 2:  # noqa: PLR2004  # see the head
            self._ops.copy(target, self._stage(number, 0, dtype, (offset_bytes, length)))
            others = range(1, self._num_ranks)
        for rank in others:
            staged = self._stage(number, rank, dtype, (offset_bytes, length))
            self._ops.combine(target, staged, op)
        if op == "avg":
            self._ops.scale(target, 1.0 / self._num_ranks)

    def _staged_owners(self) -> tuple[int, ...]:
        """Return whose parts of this rank's array have to be staged; see the head."""
        return self._others if self._index < 2 else tuple(range(self._num_ranks))  # noqa: PLR2004

    def _stage(self, number: int, rank: int, dtype: str, span: tuple[int, int]) -> Array:
        if not span[1]:
            return self._ops.empty((0,), dtype)
        return self._rounds.stage(number, rank, dtype, span)

    def _flat(self, array: Array) -> Array:
        if len(array.shape) == 1:
            return array
        return self._ops.reshape(array, (math.prod(array.shape),))

    def _copy(self, target: Array, source: Array, start: int, length: int) -> None:
        if length:
            self._ops.copy(target, self._cut(source, start, length))

    def _cut(self, flat: Array, start: int, length: int) -> Array:
        if length == flat.shape[0]:
            return flat
        return self._ops.box(flat, Box((start,), (length,)))


def _spans(count: int, most: int) -> list[tuple[int, int, bool]]:
    """Return start, length and whether it is the last, of pieces of at most `most` elements."""
    starts = range(0, count, most) if count else range(1)
    return [(start, min(most, count - start), start + most >= count) for start in starts]
