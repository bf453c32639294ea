"""The parts of shared memory alone: numbers, segments, mappings, pages."""

import gc
import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_comm._shm import counters as counters_module
from hp_comm._shm import kernel, pages
from hp_comm._shm.blocks import BlockPool
from hp_comm._shm.collective import _spans
from hp_comm._shm.counters import LINE_BYTES, Counters, is_reached
from hp_comm._shm.kernel import PAGE_BYTES, Mapping
from hp_comm._shm.pages import PrivatePages
from hp_comm._shm.ring import piece_offsets
from hp_comm._shm.segment import Segment, round_to_pages
from hp_comm.plan import ParamSpec, plan_unit
from hp_comm.testing.units import chunk_boxes

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
POSTED = 0
KINDS = ("float32", "float32")


def new_mapping(num_bytes: int = PAGE_BYTES, *, private: bool = False) -> Mapping:
    segment = Segment.create(num_bytes)
    try:
        return segment.map(private=private)
    finally:
        segment.close()


def two_mappings(num_bytes: int) -> tuple[Mapping, Mapping]:
    segment = Segment.create(num_bytes)
    try:
        return segment.map(), segment.map(private=True)
    finally:
        segment.close()


def as_bytes(mapping: Mapping) -> np.ndarray:
    return np.frombuffer(mapping.buffer, np.uint8)


def new_counters(num_ranks: int) -> list[Counters]:
    mapping = new_mapping(round_to_pages(num_ranks * LINE_BYTES))
    made = [Counters(mapping, 0, num_ranks, index) for index in range(num_ranks)]
    made[0].clear()
    return made


def look_at_nothing(counters: Counters, word: int, value: int) -> None:
    """Do what a wait without a watch does."""


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31) + 1, 2**31 - 1))
def test_is_reached_of_any_distance_equals_the_sign_of_the_difference(word, ahead):
    assert is_reached((word + ahead) % 2**32, word) == (ahead >= 0)


def test_counters_start_just_before_the_wrap_of_the_word():
    mapping = new_mapping()
    Counters(mapping, 0, 2, 0).clear()
    assert 2**32 - 1000 < int.from_bytes(mapping.buffer[:4], "little") < 2**32


def test_counters_pass_the_wrap_and_still_compare():
    mine, theirs = new_counters(2)
    theirs.publish(POSTED, 300)  # more than what is left below 2**32
    assert mine.is_soon(POSTED, 300)
    assert not mine.missing(POSTED, 299)
    assert mine.missing(POSTED, 301) == (1,)
    assert mine.read(1, POSTED) == 300


def test_sleep_without_the_others_returns_who_is_missing():
    first, second, _third = new_counters(3)
    second.publish(POSTED, 1)
    assert first.sleep(POSTED, 1, 0.05, look_at_nothing) == (2,)


def test_sleep_is_woken_by_a_publish_amid_a_slice(monkeypatch):
    monkeypatch.setattr(counters_module, "_FIRST_SLICE_S", 10.0)
    mine, theirs = new_counters(2)
    timer = threading.Timer(0.1, theirs.publish, (POSTED, 1))
    timer.start()
    start = time.monotonic()
    assert mine.sleep(POSTED, 1, 20.0, look_at_nothing) == ()
    assert time.monotonic() - start < 5.0
    timer.join()


def test_sleep_looks_at_the_others_between_slices():
    mine, _theirs = new_counters(2)
    seen = []
    mine.sleep(POSTED, 1, 0.5, lambda counters, word, value: seen.append((word, value)))
    assert (POSTED, 1) in seen


def test_segment_is_for_its_user_alone_and_has_no_name():
    before = sorted(os.listdir("/dev/shm"))
    segment = Segment.create(10)
    assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o600
    assert os.fstat(segment.descriptor).st_nlink == 0
    assert sorted(os.listdir("/dev/shm")) == before
    segment.close()


def test_segment_is_sealed_against_other_sizes():
    segment = Segment.create(10)
    assert os.fstat(segment.descriptor).st_size == PAGE_BYTES
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 0)
    segment.close()


def test_segment_where_memfd_is_missing_is_a_file_without_a_name(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    before = sorted(os.listdir("/dev/shm"))
    segment = Segment.create(10)
    segment.map().buffer[0] = 7
    assert segment.map().buffer[0] == 7
    assert stat.S_IMODE(os.fstat(segment.descriptor).st_mode) == 0o600
    assert sorted(os.listdir("/dev/shm")) == before
    segment.close()


def test_segment_shorter_than_announced_is_refused():
    segment = Segment.create(PAGE_BYTES)
    with pytest.raises(OSError, match=f"{PAGE_BYTES} of {2 * PAGE_BYTES} bytes"):
        Segment.adopt(os.dup(segment.descriptor), 2 * PAGE_BYTES)
    segment.close()


def test_mapping_stays_while_an_array_needs_it_and_goes_with_it():
    mapping = new_mapping(3 * PAGE_BYTES)
    place = f"{mapping.address:x}-"
    array = as_bytes(mapping)[5:6]
    del mapping
    gc.collect()
    array[0] = 9
    assert place in Path("/proc/self/maps").read_text(encoding="ascii")
    del array
    gc.collect()
    assert place not in Path("/proc/self/maps").read_text(encoding="ascii")


def test_mapping_of_a_closed_descriptor_raises_with_the_reason():
    with pytest.raises(OSError, match="mmap of 4096 bytes"):
        Mapping(-1, 4096)


def test_private_page_that_was_written_stays_behind_until_it_is_dropped():
    shared, private = two_mappings(4 * PAGE_BYTES)
    owner, reader = as_bytes(shared), as_bytes(private)
    owner[:] = 1
    reader[0] = 9
    owner[:] = 2
    assert (reader[0], reader[1], reader[PAGE_BYTES], owner[0]) == (9, 1, 2, 2)
    PrivatePages(private).drop_own()
    assert reader.tolist() == [2] * len(reader)


@pytest.mark.parametrize("num_edits", [0, 1, 3, 200], ids="{} edits".format)
def test_private_pages_dropped_are_those_that_were_written(monkeypatch, num_edits):
    num_pages = 512
    shared, private = two_mappings(num_pages * PAGE_BYTES)
    as_bytes(shared)[:] = 1
    reader = as_bytes(private)
    reader.sum()
    edited = np.arange(num_edits) * 2
    reader[edited * PAGE_BYTES] = 9
    dropped = []
    monkeypatch.setattr(
        Mapping, "drop", lambda _self, start, length: dropped.append((start, length))
    )
    PrivatePages(private).drop_own()
    covered = {page for start, length in dropped for page in _pages(start, length)}
    assert covered >= set(edited.tolist())
    if num_edits <= 64:
        assert covered == set(edited.tolist())


def _pages(start: int, length: int) -> range:
    return range(start // PAGE_BYTES, (start + length) // PAGE_BYTES)


def test_private_pages_without_a_page_table_are_all_dropped(monkeypatch):
    monkeypatch.setattr(pages, "is_pagemap_right", lambda: False)
    shared, private = two_mappings(4 * PAGE_BYTES)
    reader = as_bytes(private)
    reader[PAGE_BYTES] = 9
    as_bytes(shared)[:] = 2
    PrivatePages(private).drop_own()
    assert reader.tolist() == [2] * len(reader)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_spans_cover_all_elements_once_in_order(count, most):
    spans = _spans(count, most)
    covered = [i for start, length, _last in spans for i in range(start, start + length)]
    assert covered == list(range(count))
    assert all(length <= most for _start, length, _last in spans)
    assert [last for _start, _length, last in spans] == [False] * (len(spans) - 1) + [True]


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64"]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
)
def test_pieces_of_an_area_never_overlap(num_ranks, params):
    specs = [
        ParamSpec(
            str(i), (size,), chunk_boxes((size,), 0, num_ranks), "float32", "float32", dtype, train
        )
        for i, (size, dtype, train) in enumerate(params)
    ]
    offsets = piece_offsets(plan_unit(specs, world_size=num_ranks))
    taken = {*range(8 + len(specs))}  # the head: two numbers, then a byte per parameter
    for owner in range(num_ranks):
        for index, spec in enumerate(specs):
            size = {"float32": 4, "float64": 8}[spec.reduce_dtype] if spec.trainable else 0
            start = offsets[owner][index]
            piece = {*range(start, start + spec.boxes[owner].num_elements * size)}
            assert not piece & taken
            assert start % 64 == 0
            taken |= piece
    assert max(taken) < offsets[-1][0]


def test_block_is_used_again_only_when_nothing_refers_to_it():
    pool = BlockPool([100_000])
    first = np.frombuffer(pool.take(100_000), np.uint8)[10:20]
    place = first.ctypes.data - 10
    second = np.frombuffer(pool.take(100_000), np.uint8)
    assert second.ctypes.data != place
    del first
    assert np.frombuffer(pool.take(100_000), np.uint8).ctypes.data == place


def test_blocks_beyond_what_a_pool_needs_are_given_back():
    pool = BlockPool([100_000])
    taken = [np.frombuffer(pool.take(100_000), np.uint8) for _ in range(5)]
    places = [f"{array.ctypes.data:x}-" for array in taken]
    del taken
    assert sum(_is_mapped(place) for place in places) <= 2


def test_block_outlives_its_pool():
    pool = BlockPool([100_000])
    array = np.frombuffer(pool.take(100_000), np.uint8)
    array[:] = 3
    place = f"{array.ctypes.data:x}-"
    del pool
    assert array.min() == 3
    del array
    assert not _is_mapped(place)


def _is_mapped(place: str) -> bool:
    return any(
        line.startswith(place)
        for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    )


def test_fence_on_a_machine_that_reorders_is_a_real_barrier(monkeypatch):
    calls = []
    barrier = kernel._membarrier
    monkeypatch.setattr(kernel, "_NEEDS_FENCE", True)
    monkeypatch.setattr(
        kernel, "_membarrier", lambda *args: calls.append((args[1:], barrier(*args)))
    )
    mine, theirs = new_counters(2)
    theirs.publish(POSTED, 1)  # one after the data, before the number
    assert mine.is_soon(POSTED, 1)  # one after the number, before the data
    global_expedited = (2, 0, 0)  # linux/membarrier.h
    assert calls == [(global_expedited, 0)] * 2


@pytest.mark.parametrize(
    ("platform", "futex"), [("darwin", 202), ("linux", -1)], ids=["system", "machine"]
)
def test_other_platform_is_named_in_the_reason(monkeypatch, platform, futex):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(kernel, "_FUTEX", futex)
    reason = kernel.why_unsupported.__wrapped__()
    assert f"needs 64-bit Linux on x86_64 or aarch64, this is {platform}" in reason
