"""Memory for reduced gradients that is used again once nobody refers to it any more.

A new large array costs a page fault per 4 KiB, some microseconds each, and freeing it gives the
pages back: more than adding the numbers does. Here a block returns to its pool by garbage
collection of the last array over it, pages in place, so that a steady step faults nothing. An
array that is kept just makes the pool take a new block next time.

Source: the caching allocators of deep learning frameworks, with Python's collector as the judge.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hp_comm._shm.kernel import map_anonymous, unmap
from hp_comm._shm.segment import round_to_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALLEST_BYTES = 64 * 1024
"""A smaller array is better off in the allocator's heap, whose pages stay anyway."""

_IDLE_PER_USE = 2


@dataclass
class _Idle:
    """Blocks without a user; outlives the pool as long as a block has one."""

    most: Counter[int]
    by_length: dict[int, list[int]] = field(default_factory=dict)

    def put(self, address: int, num_bytes: int) -> None:
        idle = self.by_length.setdefault(num_bytes, [])
        if len(idle) < self.most[num_bytes]:
            idle.append(address)
        else:
            unmap(address, num_bytes)

    def close(self) -> None:
        self.most = Counter()
        for num_bytes, addresses in self.by_length.items():
            while addresses:
                unmap(addresses.pop(), num_bytes)


class BlockPool:
    """Blocks of memory of a few lengths.

    Args:
        lengths_bytes: Lengths of all blocks that are in use at a time.

    Example:
        >>> pool = BlockPool([100_000])
        >>> len(pool.take(100_000)) >= 100_000
        True
    """

    def __init__(self, lengths_bytes: Iterable[int]) -> None:
        uses = Counter(round_to_pages(length) for length in lengths_bytes)
        most = Counter({length: _IDLE_PER_USE * number for length, number in uses.items()})
        self._idle = _Idle(most)
        weakref.finalize(self, self._idle.close).atexit = False

    def take(self, num_bytes: int) -> memoryview:
        """Return memory with undefined contents, for as long as something refers to it.

        Raises:
            OSError: The system has none left.
        """
        num_bytes = round_to_pages(num_bytes)
        idle = self._idle.by_length.get(num_bytes)
        address = idle.pop() if idle else map_anonymous(num_bytes)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, self._idle.put, address, num_bytes).atexit = False
        return memoryview(memory).cast("B")
