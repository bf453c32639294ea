"""How the command follows what rank 0 writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hyper_parallel.demo.events import Event, EventFollower, EventReader, EventWriter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_reader_of_missing_file_finds_nothing(path: Path) -> None:
    assert EventReader(path).read() == []


def test_reader_returns_each_event_once(path: Path) -> None:
    reader = EventReader(path)
    first, second = Event("started", 1, 0), Event("stepped", 1, 1, loss=2.0, train_s=0.5)

    with EventWriter(path) as writer:
        writer.write(first)
        assert reader.read() == [first]
        writer.write(second)
        assert reader.read() == [second]
    assert reader.read() == []


def test_reader_waits_for_the_rest_of_a_line(path: Path) -> None:
    event = Event("saved", 2, 7)
    line = event.to_line().encode()
    reader = EventReader(path)

    path.write_bytes(line + line[:10])
    assert reader.read() == [event]
    path.write_bytes(line + line)
    assert reader.read() == [event]


def test_follower_delivers_all_that_was_written_before_it_is_left(path: Path) -> None:
    events = [Event("stepped", 1, step, loss=1.0) for step in range(100)]
    received: list[Event] = []

    with EventFollower(EventReader(path), received.append), EventWriter(path) as writer:
        for event in events:
            writer.write(event)

    assert received == events
