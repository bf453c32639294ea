"""What a trace records: collectives, copies, from every thread, nested."""

import threading

import pytest

from hp_comm import CommDebugMode, CommTrace
from hp_comm.trace import muted, note_collective, note_copy


def note(kind: str = "all_gather", wire_bytes: int = 8, **more: object) -> None:
    note_collective(kind, group="dp", transport="shm", wire_bytes=wire_bytes, **more)


def test_trace_keeps_events_in_order_with_all_they_say() -> None:
    with CommTrace() as trace:
        note("all_gather", 8, label="layers.0", sequence=3)
        note_copy("all_gather", copied_bytes=5, label="layers.0")
    first, second = trace.events
    assert (first.kind, first.label, first.group, first.transport) == (
        "all_gather",
        "layers.0",
        "dp",
        "shm",
    )
    assert (first.sequence, first.wire_bytes, first.copied_bytes) == (3, 8, 0)
    assert (second.kind, second.group, second.copied_bytes) == ("all_gather", "", 5)


def test_trace_counts_collectives_and_not_copies() -> None:
    with CommTrace() as trace:
        note("all_gather")
        note("all_gather")
        note("reduce_scatter")
        note_copy("all_gather", copied_bytes=5)
    assert trace.counts() == {"all_gather": 2, "reduce_scatter": 1}


def test_trace_adds_bytes_of_all_or_one_kind() -> None:
    with CommTrace() as trace:
        note("all_gather", 8)
        note("all_reduce", 4)
        note_copy("all_gather", copied_bytes=5)
        note_copy("reduce_scatter", copied_bytes=2)
    assert (trace.wire_bytes(), trace.wire_bytes("all_gather")) == (12, 8)
    assert (trace.copied_bytes(), trace.copied_bytes("all_gather")) == (7, 5)


def test_nested_traces_both_see_what_is_inside_both() -> None:
    with CommTrace() as outer:
        note("all_gather")
        with CommTrace() as inner:
            note("broadcast")
        note("barrier")
    assert outer.counts() == {"all_gather": 1, "broadcast": 1, "barrier": 1}
    assert inner.counts() == {"broadcast": 1}


def test_trace_that_ended_records_nothing_more_also_after_an_error() -> None:
    trace = CommTrace()

    def fail_inside() -> None:
        with trace:
            note()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    note()
    assert trace.counts() == {"all_gather": 1}


def test_trace_can_be_entered_again_and_goes_on() -> None:
    trace = CommTrace()
    for _ in range(2):
        with trace:
            note()
    assert trace.counts() == {"all_gather": 2}


def test_trace_entered_twice_counts_once() -> None:
    trace = CommTrace()
    with trace, trace:
        note()
    note()
    assert trace.counts() == {"all_gather": 1}


def test_trace_sees_all_threads() -> None:
    with CommTrace() as trace:
        threads = [threading.Thread(target=note) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert trace.counts() == {"all_gather": 8}


def test_muted_hides_collectives_of_this_thread_but_no_copies() -> None:
    with CommTrace() as trace:
        with muted():
            note("all_gather")
            with muted():
                note("all_gather")
            note("all_gather")
            note_copy("all_gather", copied_bytes=3)
            other = threading.Thread(target=note, args=("barrier",))
            other.start()
            other.join()
        note("broadcast")
    assert trace.counts() == {"barrier": 1, "broadcast": 1}
    assert trace.copied_bytes() == 3


def test_copy_of_nothing_is_no_event() -> None:
    with CommTrace() as trace:
        note_copy("all_gather", copied_bytes=0)
    assert trace.events == ()


def test_debug_mode_reads_like_torchs() -> None:
    with CommDebugMode() as mode:
        note("all_gather")
        note("all_reduce")
    assert mode.get_comm_counts() == {"all_gather": 1, "all_reduce": 1}
    assert mode.get_total_counts() == 2
