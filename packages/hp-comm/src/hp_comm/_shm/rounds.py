"""Numbered meetings of all ranks of a group, with a place for each rank's bytes.

A round has four steps: `begin` (wait until nobody reads what this rank staged two rounds ago),
`post` (publish what was staged, with a text that says which call this is), `arrive` (wait for all
the others; all texts must agree) and `release` (this rank needs the others' bytes no more).
Two rounds may be under way: staging memory exists twice, for even and odd rounds.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm._shm.board import LENGTH, POSTED, RELEASED, STAGE_BYTES, mismatch

if TYPE_CHECKING:
    from hp_comm._shm.board import Board
    from hp_comm._shm.seat import Seat
    from hp_comm._shm.watch import Watch
    from hp_comm.ports import Array, ArrayOps

_KEPT_VIEWS = 512


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective, as the others and errors see it."""

    operation: str
    """Name of the operation, for errors."""

    sequence: int
    """Number of the call in this group, counted from 1."""

    text: bytes
    """What must be equal on all ranks: operation, data type, length."""

    dtype: str = ""
    """Data type of the array; empty where there is none."""

    count: int = 0
    """Elements of the array that the text names."""


class Rounds:
    """The rounds of one group.

    Args:
        seat: This process's place in the group.
        board: The group's segment.
        ops: The tensor operations.
        watch: Waits for the others.
    """

    def __init__(self, seat: Seat, board: Board, ops: ArrayOps, watch: Watch) -> None:
        self.timeout_s: float | None = None
        self._seat = seat
        self._board = board
        self._ops = ops
        self._watch = watch
        self._last = 0
        self._views: OrderedDict[tuple[int, str, int], Array] = OrderedDict()
        self._peers = tuple(i for i in range(seat.num_ranks) if i != seat.index)

    def begin(self, call: Call) -> int:
        """Return the number of a new round, once its staging memory may be written."""
        self._last += 1
        self._wait(RELEASED, self._last - 2, call)
        return self._last

    def post(self, number: int, call: Call, length: int = 0) -> None:
        """Publish what this rank staged.

        Args:
            number: Of the round.
            call: Which call the round belongs to.
            length: A number for the others, in `[0, 2**32)`.
        """
        self._board.write_text(number, call.text)
        self._board.counters.store(LENGTH + (number & 1), length)
        self._board.counters.publish(POSTED, number)

    def arrive(self, number: int, call: Call) -> None:
        """Return when all ranks posted the round.

        Raises:
            CommTimeoutError: Somebody did not in time.
            MismatchError: Somebody posted another call.
        """
        self._wait(POSTED, number, call)
        for rank in self._peers:
            if not self._board.has_text(number, rank, call.text):
                everybody = range(self._seat.num_ranks)
                texts = [self._board.read_text(number, rank) for rank in everybody]
                raise mismatch(self._seat, texts)

    def has_arrived(self, number: int) -> bool:
        """Tell whether `arrive` would return at once."""
        return not self._board.counters.missing(POSTED, number)

    def release(self, number: int) -> None:
        """Say that this rank needs the others' bytes of a round no more.

        Nobody can be asleep for this unless this rank posted a later round already.
        """
        if self._last > number:
            self._board.counters.publish(RELEASED, number)
        else:
            self._board.counters.store(RELEASED, number)

    def length(self, number: int, rank: int) -> int:
        """Return the number that a rank posted with a round."""
        return self._board.counters.read(rank, LENGTH + (number & 1))

    def stage_bytes(self, number: int, rank: int) -> memoryview:
        """Return a rank's staging memory of a round."""
        start = self._stage_place(number, rank)
        return self._board.staging[start : start + STAGE_BYTES]

    def stage(self, number: int, rank: int, dtype: str, span: tuple[int, int]) -> Array:
        """Return a part of a rank's staging memory of a round as an array.

        Args:
            number: Of the round.
            rank: Whose memory, as a group index.
            dtype: Data type.
            span: Where it starts, in bytes, and how many elements it has.
        """
        offset_bytes, length = span
        place = self._stage_place(number, rank) + offset_bytes
        key = (place, dtype, length)
        found = self._views.get(key)
        if found is None:
            found = self._ops.from_buffer(self._board.staging, (length,), dtype, place)
            self._views[key] = found
            if len(self._views) > _KEPT_VIEWS:
                self._views.popitem(last=False)
        return found

    def _wait(self, word: int, number: int, call: Call) -> None:
        self._watch.wait(
            self._board.counters, (word, number), (call.operation, call.sequence), self.timeout_s
        )

    def _stage_place(self, number: int, rank: int) -> int:
        return ((number & 1) * self._seat.num_ranks + rank) * STAGE_BYTES
