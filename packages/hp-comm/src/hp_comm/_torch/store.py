"""The c10d store as the place where ranks find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from hp_comm.errors import CommError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class StoreRendezvous:
    """Implements `hp_comm.ports.Rendezvous` over a store of torch.distributed.

    Args:
        store: Reached by all ranks of the job.

    Example:
        >>> import torch.distributed as dist
        >>> rendezvous = StoreRendezvous(dist.HashStore())
        >>> rendezvous.put("key", b"value")
        >>> rendezvous.wait_for("key", timeout_s=1)
        b'value'
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Store a value; a later one replaces it."""
        self._store.set(key, value.hex())

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """Return the value as soon as somebody stored it.

        Raises:
            TimeoutError: Nobody did in time, or the rank that holds the store is gone.
        """
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return self._get(key)
        except RuntimeError as error:  # DistError, or a plain one of FileStore
            raise TimeoutError(f"nobody stored {key!r} within {timeout_s} s") from error

    def peek(self, key: str) -> bytes | None:
        """Return the value, or None where there is none or the store can't be reached."""
        try:
            return self._get(key) if self._store.check([key]) else None
        except RuntimeError:
            return None

    def count_up(self, key: str) -> int:
        """Return how often this was called for the key, by any rank, this time included.

        Raises:
            CommError: The rank that holds the store is gone.
        """
        try:
            return int(self._store.add(key, 1))
        except RuntimeError as error:
            raise CommError(
                f"{key!r} was to be counted and the store of the job can't be reached ({error}). "
                f"Look for the rank that ended, mostly rank 0, and start the job again."
            ) from error

    def _get(self, key: str) -> bytes:
        return bytes.fromhex(self._store.get(key).decode())
