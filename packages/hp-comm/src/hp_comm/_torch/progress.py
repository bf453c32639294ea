"""Which ranks of a group have not arrived at a collective, when a wait for it ends in vain.

A rank whose wait takes longer than a moment posts the number of the last collective it started.
A rank whose wait is over posts too, gives the others a moment to do the same, and reads: who
posted a lower number, or nothing, isn't here. Short waits post nothing.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from hp_comm.errors import MismatchError

if TYPE_CHECKING:
    from hp_comm._torch.store import StoreRendezvous

TIME_OUT_GRACE_S = 1.0
"""How long the others have to post, once a wait is over: who came has posted by then."""

FAILURE_GRACE_S = 3.0
"""The same where a collective failed before that: the others have to find out first."""

_POLL_S = 0.02


class Progress:
    """One rank's posts, and what it reads of the others'.

    Args:
        store: Where ranks post.
        key: A prefix in it that only this group uses.
        index: This process's group index.
        ranks: Global ranks by group index.
    """

    def __init__(
        self, store: StoreRendezvous, key: str, *, index: int, ranks: tuple[int, ...]
    ) -> None:
        self._store = store
        self._key = key
        self._index = index
        self._ranks = ranks

    def post(self, started: int, waits_for: tuple[int, str]) -> None:
        """Tell the others where this rank is.

        Args:
            started: Number of the last collective that it started.
            waits_for: Number and operation of the one it waits for.
        """
        text = f"{started} {waits_for[0]} {waits_for[1]}"
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
            self._store.put(f"{self._key}/{self._index}", text.encode())

    def missing(self, sequence: int, operation: str, grace_s: float) -> tuple[int, ...]:
        """Return the global ranks that don't say that they have started a collective.

        Args:
            sequence: Its number.
            operation: Its name.
            grace_s: How long they have to say so, in seconds.

        Raises:
            MismatchError: A rank waits for another operation under this number.
        """
        end = time.monotonic() + grace_s
        late = [index for index in range(len(self._ranks)) if index != self._index]
        while late and time.monotonic() < end:
            late = [index for index in late if not self._has_started(index, sequence, operation)]
            if late:
                time.sleep(_POLL_S)
        return tuple(self._ranks[index] for index in late)

    def _has_started(self, index: int, sequence: int, operation: str) -> bool:
        raw = self._store.peek(f"{self._key}/{index}")
        if raw is None:
            return False
        started, number, other = raw.decode().split(" ", 2)
        if int(number) == sequence and other != operation:
            raise MismatchError(
                f"rank {self._ranks[self._index]} is in {operation} and rank {self._ranks[index]} "
                f"in {other}, both number {sequence} of their group. Make the same calls in the "
                f"same order on every rank."
            )
        return int(started) >= sequence
