"""The system calls that shared memory needs and Python has no function for.

Mapping memory (unmapped by garbage collection), giving pages back, sleeping on a 4-byte word that
other processes write (futex), and the memory barrier of `fence`.

Note [publishing without atomics]
    A rank publishes data by writing it, calling `fence`, and then storing a sequence number in a
    4-byte word; a reader that sees the number calls `fence` and then reads the data. Python has no
    atomic store, but storing 4 aligned bytes through a memoryview is one machine instruction on
    every machine named below, so a reader sees the old number or the new one. What is left is
    order. x86-64 never reorders two stores or two loads of one thread, and needs nothing. Other
    machines do: there `fence` is `membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)`, in which the
    kernel runs a full barrier on the calling CPU (and on those of all registered processes).
    No code relies on a store being seen before a later load of the same thread: whoever sleeps
    does so in FUTEX_WAIT, which compares the word under the kernel's own lock.

Source: futex(2), membarrier(2), mmap(2), madvise(2), memfd_create(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import weakref
from functools import lru_cache

MASK = 0xFFFF_FFFF
PAGE_BYTES = mmap.PAGESIZE

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_REGISTER_GLOBAL_EXPEDITED, _GLOBAL_EXPEDITED = 1 << 2, 1 << 1
_MADV_DONTNEED, _MADV_REMOVE = 4, 9
_SYSTEM_CALLS = {"x86_64": (202, 324), "aarch64": (98, 283)}
_FUTEX, _MEMBARRIER = _SYSTEM_CALLS.get(platform.machine(), (-1, -1))
_NEEDS_FENCE = platform.machine() != "x86_64"
_ALL_WAITERS = 0x7FFF_FFFF
_POINTER_BITS = 64


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Sleeping lets other threads run (CDLL); the short calls keep the interpreter lock (PyDLL).
_sleepy = ctypes.CDLL(None, use_errno=True)
_brief = ctypes.PyDLL(None, use_errno=True)
_futex_wait = _sleepy["syscall"]
_futex_wait.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_long,
)
_futex_wake = _brief["syscall"]
_futex_wake.argtypes = _futex_wait.argtypes
_membarrier = _brief["syscall"]
_membarrier.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long)
_mmap = _sleepy["mmap"]
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = _brief["munmap"]
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _brief["madvise"]
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@lru_cache(maxsize=1)
def why_unsupported() -> str | None:
    """Return what this machine lacks for shared memory between ranks, or None.

    Example:
        >>> why_unsupported() is None or "needs" in why_unsupported()
        True
    """
    system, bits = f"{sys.platform} on {platform.machine()}", 8 * ctypes.sizeof(ctypes.c_void_p)
    if not sys.platform.startswith("linux") or _FUTEX < 0 or bits != _POINTER_BITS:
        return f"it needs 64-bit Linux on {' or '.join(_SYSTEM_CALLS)}, this is {system}"
    word = (ctypes.c_uint32 * 1)(1)
    _futex_wait(_FUTEX, ctypes.addressof(word), _FUTEX_WAIT, 0, None, None, 0)
    if ctypes.get_errno() != errno.EAGAIN:
        return f"it needs the futex system call: {os.strerror(ctypes.get_errno())}"
    if _NEEDS_FENCE and _membarrier(_MEMBARRIER, _REGISTER_GLOBAL_EXPEDITED, 0, 0):
        return f"it needs the membarrier system call: {os.strerror(ctypes.get_errno())}"
    return None


def fence() -> None:
    """Order the memory accesses before this call before those after it.

    See Note [publishing without atomics].
    """
    if _NEEDS_FENCE:
        _membarrier(_MEMBARRIER, _GLOBAL_EXPEDITED, 0, 0)


def futex_wake(address: int) -> None:
    """Wake everybody, in any process, who sleeps on the 4-byte word at an address."""
    _futex_wake(_FUTEX, address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0)


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 4-byte word at an address holds a value.

    May return early for no reason, as every futex may: the caller reads the word again.

    Args:
        address: Where the word lies, divisible by 4.
        value: The call returns at once where the word holds another, in `[0, 2**32)`.
        timeout_s: Longest sleep, in seconds.
    """
    whole = int(timeout_s)
    limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
    _futex_wait(_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(limit), None, 0)


def _map(num_bytes: int, kind: int, descriptor: int, offset_bytes: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address: int | None = _mmap(None, num_bytes, access, kind, descriptor, offset_bytes)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes: {os.strerror(code)}")
    return address


def map_anonymous(num_bytes: int) -> int:
    """Return the address of new memory of this process alone.

    Raises:
        OSError: The system has none left.
    """
    return _map(num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def unmap(address: int, num_bytes: int) -> None:
    """Give a mapping back; nothing may refer to it any more."""
    _munmap(address, num_bytes)


class Mapping:
    """A stretch of a segment, mapped into this process.

    It is unmapped once neither this object, nor a view of `buffer`, nor an array over such a view
    is left: arrays handed out never dangle.

    Args:
        descriptor: Descriptor of the segment; not needed afterwards.
        num_bytes: Length of the stretch, at least 1.
        offset_bytes: Where it starts, divisible by the page size.
        private: Keep what is written to this mapping in this process (copy on write).

    Raises:
        OSError: The system has no room for the mapping.
    """

    __slots__ = ("address", "buffer", "num_bytes")

    def __init__(
        self, descriptor: int, num_bytes: int, *, offset_bytes: int = 0, private: bool = False
    ) -> None:
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _map(num_bytes, kind, descriptor, offset_bytes)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        # Not at exit: arrays may outlive the last Python code of the process.
        weakref.finalize(memory, unmap, address, num_bytes).atexit = False
        self.address = address
        self.num_bytes = num_bytes
        self.buffer = memoryview(memory).cast("B")

    def drop(self, offset_bytes: int, num_bytes: int) -> None:
        """Forget this process's own pages (of a private mapping), or just unmap clean ones.

        Args:
            offset_bytes: Where to start, divisible by the page size.
            num_bytes: How much, rounded up to whole pages by the system.
        """
        self._advise(_MADV_DONTNEED, offset_bytes, num_bytes)

    def punch(self, offset_bytes: int, num_bytes: int) -> None:
        """Give physical pages of the segment back: everybody reads zeros until they are written."""
        self._advise(_MADV_REMOVE, offset_bytes, num_bytes)

    def _advise(self, advice: int, offset_bytes: int, num_bytes: int) -> None:
        if num_bytes and _madvise(self.address + offset_bytes, num_bytes, advice):
            code = ctypes.get_errno()
            raise OSError(code, f"madvise({advice}) of {num_bytes} bytes: {os.strerror(code)}")
