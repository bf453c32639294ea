"""How rank 0 tells the command what it has done: a file with one JSON object a line.

A file, because it needs no connection that could break, survives whoever writes it, and is a log
afterwards. The reader copes with a last line that is only half there.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EventKind = Literal["started", "stepped", "validated", "saved"]
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a phase.

    Example:
        >>> Event.from_line(Event("stepped", phase=1, step=3, loss=2.5).to_line()).step
        3
    """

    kind: EventKind
    """What happened."""
    phase: int
    """In which phase."""
    step: int
    """Steps done since the run began."""
    loss: float | None = None
    """Mean loss over all ranks, in nats per byte."""
    train_s: float = 0.0
    """Time in training steps of this phase until now, in seconds."""

    def to_line(self) -> str:
        """Return the line that stands for this event."""
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def from_line(line: str) -> Event:
        """Return the event that a line stands for."""
        return Event(**json.loads(line))


class EventWriter:
    """Appends events to a file; one process writes at a time.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> path = Path(tempfile.mkdtemp(), "events.jsonl")
        >>> with EventWriter(path) as writer:
        ...     writer.write(Event("started", phase=1, step=0))
        >>> reader = EventReader(path)
        >>> [event.kind for event in reader.read()], reader.read()
        (['started'], [])
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, event: Event) -> None:
        """Append one event, readable at once."""
        self._file.write(event.to_line())
        self._file.flush()


class EventReader:
    """Reads what was appended to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0

    def read(self) -> list[Event]:
        """Return the events of all whole lines that are new; none where there is no file yet."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._place += len(whole)
        return [Event.from_line(line) for line in whole.decode().splitlines()]


class EventFollower:
    """Calls a function with every new event of a reader, from a thread, until left.

    Everything that was written before leaving is delivered before leaving returns.
    """

    def __init__(self, reader: EventReader, receive: Callable[[Event], None]) -> None:
        self._reader = reader
        self._receive = receive
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="demo-events", daemon=True)

    def __enter__(self) -> EventFollower:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(POLL_S):
            self._deliver()
        self._deliver()

    def _deliver(self) -> None:
        for event in self._reader.read():
            self._receive(event)
