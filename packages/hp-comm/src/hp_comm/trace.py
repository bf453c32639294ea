"""Counts what is communicated and what is copied, exactly.

Transports report here; with no trace active a report costs one check of an empty list.

`wire_bytes` of a collective is what this rank has to receive at least:

    all_gather        what the other ranks hold
    reduce_scatter    (n - 1) times this rank's part
    all_reduce        2 * (n - 1) / n of the array (a ring), rounded up
    broadcast         the array; 0 at the source
    barrier           0

`copied_bytes` are bytes moved inside this rank's memory besides that: packing, padding, casts to
a temporary. A one-sided write into shared memory is the wire, not a copy.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, local
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

Trace = TypeVar("Trace", bound="CommTrace")

_active: list[CommTrace] = []
_lock = Lock()
_local = local()


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective, or one copy."""

    kind: str
    """"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"; what a copy serves."""

    label: str
    """The unit it is for, or ""."""

    group: str
    """Name of the group; "" for a copy."""

    transport: str
    """What moved the bytes; "" for a copy."""

    sequence: int
    """Number of the call in its group; 0 if the transport doesn't count."""

    wire_bytes: int
    """Bytes this rank has to receive at least."""

    copied_bytes: int
    """Bytes copied inside this rank's memory."""


class CommTrace:
    """Context manager that records every collective and copy of this process, all threads.

    Example:
        >>> with CommTrace() as trace:
        ...     note_collective("all_reduce", group="dp", transport="shm", wire_bytes=8)
        >>> trace.counts()
        {'all_reduce': 1}
    """

    def __init__(self) -> None:
        self._events: list[CommEvent] = []

    def __enter__(self: Trace) -> Trace:
        with _lock:
            _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _active.remove(self)

    @property
    def events(self) -> tuple[CommEvent, ...]:
        """Everything recorded so far, in order."""
        return tuple(self._events)

    def counts(self) -> dict[str, int]:
        """Return the number of collectives by kind."""
        return dict(Counter(event.kind for event in self._events if event.group))

    def wire_bytes(self, kind: str | None = None) -> int:
        """Return the bytes received at least, of all collectives or of one kind."""
        return sum(e.wire_bytes for e in self._events if kind in (None, e.kind))

    def copied_bytes(self, kind: str | None = None) -> int:
        """Return the bytes copied besides, for all collectives or for one kind."""
        return sum(e.copied_bytes for e in self._events if kind in (None, e.kind))


class CommDebugMode(CommTrace):
    """A `CommTrace` with the reading method of torch's class of this name.

    Example:
        >>> with CommDebugMode() as mode:
        ...     note_collective("all_gather", group="dp", transport="shm", wire_bytes=8)
        >>> mode.get_comm_counts()
        {'all_gather': 1}
    """

    def get_comm_counts(self) -> dict[str, int]:
        """Return the number of collectives by kind."""
        return self.counts()

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return sum(self.counts().values())


def note_collective(
    kind: str,
    *,
    group: str,
    transport: str,
    wire_bytes: int,
    label: str = "",
    sequence: int = 0,
) -> None:
    """Report a collective that this rank starts; see the module's head for `wire_bytes`."""
    if _active and not getattr(_local, "muted", False):
        _record(CommEvent(kind, label, group, transport, sequence, wire_bytes, 0))


def note_copy(kind: str, *, copied_bytes: int, label: str = "") -> None:
    """Report bytes copied for a collective of this kind that aren't on the wire.

    Example:
        >>> with CommTrace() as trace:
        ...     note_copy("all_gather", copied_bytes=24, label="layers.0")
        >>> trace.copied_bytes("all_gather")
        24
    """
    if _active and copied_bytes:
        _record(CommEvent(kind, label, "", "", 0, 0, copied_bytes))


@contextmanager
def muted() -> Iterator[None]:
    """Report no collective of this thread inside: the caller reports the whole as one.

    Example:
        >>> with CommTrace() as trace, muted():
        ...     note_collective("all_reduce", group="dp", transport="shm", wire_bytes=8)
        >>> trace.counts()
        {}
    """
    before = getattr(_local, "muted", False)
    _local.muted = True
    try:
        yield
    finally:
        _local.muted = before


def _record(event: CommEvent) -> None:
    with _lock:
        for trace in set(_active):  # one may be entered twice
            trace._events.append(event)
