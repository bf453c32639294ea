"""Which pages of a private mapping this process has written, and making them follow again.

A page of a private mapping that was written to is a copy of this process's own: it never shows
again what the owner of the data writes. The kernel tells which pages are such copies (pagemap:
present or swapped out, and not a page of the file), at about 2 microseconds per MiB; forgetting
them is one madvise per run. Where pagemap can't be read, all pages are forgotten: right as well,
but then every page that is read again costs a fault.
"""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np

from hp_comm._shm.kernel import PAGE_BYTES, Mapping
from hp_comm._shm.segment import Segment

_ENTRY_BYTES = 8
_STATE_SHIFT = np.uint64(61)
# By the upper three bits of an entry: present (4), swapped out (2), page of a file (1).
_IS_OWN = np.array([False, False, True, True, True, False, True, True])
_MOST_RUNS = 64


class PrivatePages:
    """The pages of one private mapping.

    Args:
        mapping: A private mapping of a segment.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._first = mapping.address // PAGE_BYTES * _ENTRY_BYTES
        self._entries = np.empty(-(-mapping.num_bytes // PAGE_BYTES), np.uint64)
        self._raw = self._entries.view(np.uint8).data

    def drop_own(self) -> None:
        """Forget every page that this process has written."""
        descriptor = _pagemap(os.getpid()) if is_pagemap_right() else None
        if descriptor is None or os.preadv(descriptor, [self._raw], self._first) != len(self._raw):
            self._mapping.drop(0, self._mapping.num_bytes)
            return
        own = np.flatnonzero(_IS_OWN[self._entries >> _STATE_SHIFT])
        if len(own):
            self._drop_runs(own)

    def _drop_runs(self, own: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
        runs = np.split(own, np.flatnonzero(np.diff(own) > 1) + 1)
        if len(runs) > _MOST_RUNS:
            runs = [own[[0, -1]]]
        for run in runs:
            start, stop = int(run[0]), int(run[-1]) + 1
            self._mapping.drop(start * PAGE_BYTES, (stop - start) * PAGE_BYTES)


@lru_cache(maxsize=1)
def _pagemap(pid: int) -> int | None:
    """Return a descriptor of this process's page table; another one after a fork."""
    assert pid == os.getpid(), "the page table of another process was asked for"
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


@lru_cache(maxsize=1)
def is_pagemap_right() -> bool:
    """Tell whether the page table shows which pages are copies; found by trying on three pages."""
    segment = Segment.create(3 * PAGE_BYTES)
    try:
        mapping = segment.map(private=True)
    finally:
        segment.close()
    mapping.buffer[0] = 1  # its own
    _seen = mapping.buffer[PAGE_BYTES]  # read only
    descriptor = _pagemap(os.getpid())
    if descriptor is None:
        return False
    raw = bytearray(2 * _ENTRY_BYTES)
    try:
        num_read = os.preadv(descriptor, [raw], mapping.address // PAGE_BYTES * _ENTRY_BYTES)
    except OSError:
        return False
    states = np.frombuffer(raw, np.uint64) >> _STATE_SHIFT
    return num_read == len(raw) and states.tolist() == [4, 5]
