"""Waiting for the others: what a long wait learns about them, and which error ends it.

A wait that is short costs nothing here. After some ten milliseconds a rank says that it is parked
(in its line PARKED, a number that changes with every wait, and BEAT, one more after every look
that found nothing) and writes beside it what it waits for.

If every rank is parked, and every beat grew by two while no PARKED changed, then everybody has
looked again after the last thing that anybody published, in vain: the ranks wait for each other
in different calls. That is certain, so it is raised at once instead of at the time-out.

A missing rank whose connection is closed has ended or died, and will not come either.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hp_comm._shm.board import BEAT, PARKED, mismatch
from hp_comm._shm.kernel import MASK
from hp_comm.errors import CommError

if TYPE_CHECKING:
    from hp_comm._shm.board import Board
    from hp_comm._shm.counters import Counters
    from hp_comm._shm.handover import Handover
    from hp_comm._shm.seat import Seat

_ENOUGH_BEATS = 2


class Watch:
    """Waits for the other ranks of one group.

    Args:
        seat: This process's place in the group.
        board: The group's segment.
        handover: The connections to the others.
    """

    def __init__(self, seat: Seat, board: Board, handover: Handover) -> None:
        self._seat = seat
        self._board = board
        self._handover = handover
        self._num_waits = 0
        self._given_up = ""

    def give_up(self, reason: str) -> None:
        """Refuse all further calls of the group, because of its first error."""
        self._given_up = self._given_up or reason

    def check(self) -> None:
        """Raise if the group is closed, or an error has left its ranks at different calls.

        Raises:
            CommError: It can't be used any more.
        """
        if self._given_up:
            raise CommError(self._given_up)

    def wait(
        self,
        counters: Counters,
        target: tuple[int, int],
        call: tuple[str, int],
        timeout_s: float | None = None,
    ) -> None:
        """Return when the word of every other rank has reached a value.

        Args:
            counters: Where the word is.
            target: The word and the value.
            call: What is waited for: operation and sequence number, for errors.
            timeout_s: Longest wait, in seconds; None: the group's.

        Raises:
            CommTimeoutError: A rank did not come in time, or its process is gone.
            MismatchError: The ranks wait for each other in different calls.
        """
        if counters.is_soon(*target):
            return
        limit_s = self._seat.timeout_s if timeout_s is None else timeout_s
        self._num_waits += 1
        look = _Look(self._seat, self._board, self._handover, call=call, number=self._num_waits)
        try:
            missing = counters.sleep(*target, limit_s, look.again)
            if missing:
                raise self._seat.timed_out(*call, missing, limit_s)
        except BaseException as error:
            self.give_up(f"the group can't be used after an earlier error: {error}")
            raise
        finally:
            look.end()


class _Look:
    """One long wait's memory of what it saw at the others."""

    def __init__(
        self,
        seat: Seat,
        board: Board,
        handover: Handover,
        *,
        call: tuple[str, int],
        number: int,
    ) -> None:
        self._seat = seat
        self._board = board
        self._handover = handover
        self._call = call
        self._number = number
        self._start = time.monotonic()
        self._num_beats = 0
        self._parked: list[int] = []
        self._beats: list[int] = []

    def again(self, counters: Counters, word: int, value: int) -> None:
        """Look at the others after a sleep in which nothing came.

        Raises:
            CommTimeoutError: The process of a missing rank is gone.
            MismatchError: The ranks wait for each other in different calls.
        """
        missing = counters.missing(word, value)
        self._look_for_lost(missing, counters, (word, value))
        if not self._num_beats:
            self._board.write_activity(f"{self._call[0]} number {self._call[1]}")
            self._board.counters.publish(PARKED, self._number)
        self._num_beats += 1
        if missing:
            self._board.counters.publish(BEAT, self._num_beats)
            self._look_for_deadlock()

    def end(self) -> None:
        """Say that this rank isn't parked any more."""
        if self._num_beats:
            self._board.counters.store(PARKED, 0)

    def _look_for_lost(
        self, missing: tuple[int, ...], counters: Counters, target: tuple[int, int]
    ) -> None:
        lost = self._handover.lost()
        for rank in lost:
            if self._seat.index == 0:
                self._board.mark_lost(rank)
        gone = [rank for rank in missing if rank in lost or self._board.is_lost(rank)]
        # It may have published what is waited for and ended properly just now.
        gone = [rank for rank in gone if rank in counters.missing(*target)]
        if gone:
            waited_s = round(time.monotonic() - self._start, 1)
            raise self._seat.timed_out(*self._call, tuple(gone), waited_s)

    def _look_for_deadlock(self) -> None:
        texts = self._find_deadlock()
        if texts and len(set(texts)) > 1:
            self._board.mark_stuck()
            raise mismatch(self._seat, texts)

    def _find_deadlock(self) -> list[str]:
        """Return what each rank waits for, if it is certain that nobody comes; else nothing."""
        counters, everybody = self._board.counters, range(self._seat.num_ranks)
        texts = [self._board.read_activity(rank) for rank in everybody]
        if self._board.is_stuck():  # somebody was faster, and is parked no more
            return texts
        parked = [counters.read(rank, PARKED) for rank in everybody]
        beats = [counters.read(rank, BEAT) for rank in everybody]
        if not all(parked) or parked != self._parked:
            self._parked, self._beats = parked, beats
            return []
        grown = [(now - old) & MASK for now, old in zip(beats, self._beats, strict=True)]
        return texts if min(grown) >= _ENOUGH_BEATS else []
