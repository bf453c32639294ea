"""What lies where in a group's segment, and what the words of a rank's line mean.

place            what
nonce            64 bytes, read by every rank to prove that all see the same memory
lines            64 bytes per rank: its counters
texts            per rank two texts: its call in the last even and in the last odd round
activities       per rank a text: what it waits for
lost             one byte per rank, set by group index 0 when that rank's connection closed
stuck            one byte per rank, set by a rank that found all waiting for each other
staging          page-aligned; STAGE_BYTES per rank for even rounds, then for odd ones
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_comm._shm.counters import LINE_BYTES, Counters
from hp_comm._shm.segment import align, round_to_pages
from hp_comm.errors import MismatchError

if TYPE_CHECKING:
    from hp_comm._shm.kernel import Mapping
    from hp_comm._shm.seat import Seat

STAGE_BYTES = 1 << 20
"""How much a rank stages per round; longer arrays take several rounds. Stays in the L2 cache."""

POSTED, RELEASED = 0, 1
"""Words: the last round that this rank posted, and the last whose bytes it needs no more."""
LENGTH = 2
"""Word, and the one after it: a number posted with the last even and the last odd round."""
REDUCTION_POSTED, REDUCTION_READ = 4, 5
"""Words: the last reduction whose pieces this rank wrote, and the last it has read."""
PARKED, BEAT = 6, 7
"""Words: see watch.py."""

_NONCE_BYTES = 64
_TEXT_BYTES = 64


def encode_text(text: str) -> bytes:
    """Return a text cut and padded to its place in the segment."""
    return text.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)


def _decode_text(raw: memoryview) -> str:
    return bytes(raw).decode("ascii", "replace").strip(" \0")


class Board:
    """A group's segment, mapped into this process.

    Args:
        mapping: A shared mapping of it.
        num_ranks: Number of members.
        index: This process's group index.
    """

    def __init__(self, mapping: Mapping, num_ranks: int, index: int) -> None:
        self._num_ranks = num_ranks
        self._buffer = mapping.buffer
        self._index = index
        self._texts = _NONCE_BYTES + num_ranks * LINE_BYTES
        self._activities = self._texts + 2 * num_ranks * _TEXT_BYTES
        self._lost = self._activities + num_ranks * _TEXT_BYTES
        self._stuck = self._lost + num_ranks
        self.counters = Counters(mapping, _NONCE_BYTES, num_ranks, index)
        self.staging = mapping.buffer[_staging_offset(num_ranks) :]

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Return the length of a group's segment."""
        return _staging_offset(num_ranks) + 2 * num_ranks * STAGE_BYTES

    def set_up(self, nonce: bytes) -> None:
        """Prepare the new segment, before anybody else has it."""
        self._buffer[: len(nonce)] = nonce
        self.counters.clear()

    def nonce(self) -> bytes:
        """Return the first 32 bytes."""
        return bytes(self._buffer[:32])

    def write_text(self, round_number: int, text: bytes) -> None:
        """Write this rank's call of a round."""
        place = self._text_place(round_number, self._index)
        self._buffer[place : place + _TEXT_BYTES] = text

    def has_text(self, round_number: int, rank: int, text: bytes) -> bool:
        """Tell whether a rank's call of a round is this one."""
        place = self._text_place(round_number, rank)
        return self._buffer[place : place + _TEXT_BYTES] == text

    def read_text(self, round_number: int, rank: int) -> str:
        """Return a rank's call of a round."""
        place = self._text_place(round_number, rank)
        return _decode_text(self._buffer[place : place + _TEXT_BYTES])

    def write_activity(self, text: str) -> None:
        """Write what this rank waits for."""
        place = self._activities + self._index * _TEXT_BYTES
        self._buffer[place : place + _TEXT_BYTES] = encode_text(text)

    def read_activity(self, rank: int) -> str:
        """Return what a rank waits for, or waited for last."""
        place = self._activities + rank * _TEXT_BYTES
        return _decode_text(self._buffer[place : place + _TEXT_BYTES])

    def mark_lost(self, rank: int) -> None:
        """Tell the others that a rank's connection closed."""
        self._buffer[self._lost + rank] = 1

    def is_lost(self, rank: int) -> bool:
        """Tell whether somebody marked a rank as lost."""
        return self._buffer[self._lost + rank] != 0

    def mark_stuck(self) -> None:
        """Tell the others that all ranks wait for each other."""
        self._buffer[self._stuck + self._index] = 1

    def is_stuck(self) -> bool:
        """Tell whether any rank found that all wait for each other."""
        return any(self._buffer[self._stuck : self._stuck + self._num_ranks])

    def _text_place(self, round_number: int, rank: int) -> int:
        return self._texts + (2 * rank + (round_number & 1)) * _TEXT_BYTES


def mismatch(seat: Seat, texts: list[str]) -> MismatchError:
    """Return the error for ranks at different calls.

    Args:
        seat: This process's place in the group.
        texts: What each rank is at, by group index.
    """
    who = "; ".join(f"rank {rank}: {text}" for rank, text in zip(seat.ranks, texts, strict=True))
    return MismatchError(
        f"ranks of group {seat.name!r} are at different calls: {who}. Make the same calls with "
        f"the same sizes and data types in the same order on every rank."
    )


def _staging_offset(num_ranks: int) -> int:
    per_rank = LINE_BYTES + 3 * _TEXT_BYTES
    return round_to_pages(align(_NONCE_BYTES + num_ranks * per_rank + 2 * num_ranks))
