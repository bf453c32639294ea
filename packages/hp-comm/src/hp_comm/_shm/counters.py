"""One line of sequence numbers per rank in shared memory, and how a rank waits for another's.

Every rank writes its own line only. Numbers count from 0 and grow by one. In memory they start
shortly before 2**32, so that every job soon passes the wrap-around: all that is compared is the
distance between two numbers, which stays far below 2**31.

A wait first reads the word some hundred times (a few ten microseconds: what an even step takes),
then gives its CPU away a few times, and then sleeps on the word in slices. After each slice a
watcher looks at the peers (one may have died). With more ranks than CPUs it sleeps sooner.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hp_comm._shm.kernel import MASK, Mapping, fence, futex_wait, futex_wake

if TYPE_CHECKING:
    from collections.abc import Callable

LINE_BYTES = 64
NUM_WORDS = LINE_BYTES // 4

_START = 2**32 - 256
_BEHIND = 1 << 31
_NUM_SPINS = 300
_NUM_SPINS_CROWDED = 20
_NUM_YIELDS = 4
_FIRST_SLICE_S = 0.01
_LAST_SLICE_S = 0.1


def is_reached(word: int, value: int) -> bool:
    """Tell whether a word that was read stands at `value` or later, across the wrap at 2**32.

    Example:
        >>> is_reached(5, 5), is_reached(4, 5), is_reached(3, 2**32 - 1), is_reached(2**32 - 1, 3)
        (True, False, True, False)
    """
    return (word - value) & MASK < _BEHIND


class Counters:
    """The lines of all ranks of a group.

    Args:
        mapping: A shared mapping that all ranks have.
        offset_bytes: Where the lines start in it, divisible by 64.
        num_ranks: How many lines there are.
        index: Which line is this rank's.
    """

    def __init__(self, mapping: Mapping, offset_bytes: int, num_ranks: int, index: int) -> None:
        stop = offset_bytes + num_ranks * LINE_BYTES
        self._words = mapping.buffer[offset_bytes:stop].cast("I")
        self._address = mapping.address + offset_bytes
        self._own = index * NUM_WORDS
        self._peers = tuple(rank for rank in range(num_ranks) if rank != index)
        self._places = tuple(rank * NUM_WORDS for rank in self._peers)
        crowded = num_ranks > len(os.sched_getaffinity(0))
        self._num_spins = _NUM_SPINS_CROWDED if crowded else _NUM_SPINS

    def clear(self) -> None:
        """Set every word of every line to 0, before anybody else has the segment."""
        for position in range(len(self._words)):
            self._words[position] = _START

    def store(self, word: int, value: int) -> None:
        """Set a word of this rank's line without ordering and without waking anybody."""
        self._words[self._own + word] = (value + _START) & MASK

    def publish(self, word: int, value: int) -> None:
        """Set a word of this rank's line after all that was written before, and wake waiters."""
        place = self._own + word
        fence()
        self._words[place] = (value + _START) & MASK
        futex_wake(self._address + 4 * place)

    def read(self, rank: int, word: int) -> int:
        """Return a word of a rank's line, modulo 2**32."""
        return (self._words[rank * NUM_WORDS + word] - _START) & MASK

    def missing(self, word: int, value: int) -> tuple[int, ...]:
        """Return the other ranks whose word has not reached a value."""
        return tuple(rank for rank in self._peers if not is_reached(self.read(rank, word), value))

    def is_soon(self, word: int, value: int) -> bool:
        """Tell whether the word of every other rank reaches a value within a few microseconds."""
        words, stored = self._words, value + _START
        for place in self._places:
            position = place + word
            if (words[position] - stored) & MASK >= _BEHIND and not self._spin(position, stored):
                return False
        fence()
        return True

    def sleep(
        self,
        word: int,
        value: int,
        timeout_s: float,
        look: Callable[[Counters, int, int], None],
    ) -> tuple[int, ...]:
        """Return when the word of every other rank has reached a value, or when time is over.

        Args:
            word: Which word of the lines.
            value: What to wait for; compared across the wrap.
            timeout_s: Longest wait, in seconds.
            look: Called between sleeps with this object, the word and the value; may raise.

        Returns:
            The ranks that had not reached it when the time was over; empty in the good case.
        """
        deadline, slice_s = time.monotonic() + timeout_s, _FIRST_SLICE_S
        for place in self._places:
            position = place + word
            while not is_reached(found := self._words[position], value + _START):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    missing = self.missing(word, value)
                    fence()
                    return missing
                futex_wait(self._address + 4 * position, found, min(slice_s, left_s))
                if slice_s < _LAST_SLICE_S:
                    slice_s = min(2 * slice_s, _LAST_SLICE_S)
                else:
                    look(self, word, value)
        fence()
        return ()

    def _spin(self, position: int, stored: int) -> bool:
        words = self._words
        for _ in range(self._num_spins):
            if (words[position] - stored) & MASK < _BEHIND:
                return True
        for _ in range(_NUM_YIELDS):
            os.sched_yield()
            if (words[position] - stored) & MASK < _BEHIND:
                return True
        return False
