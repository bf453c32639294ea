"""The c10d store as the place where ranks find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistStoreError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class StoreRendezvous:
    """Implements `hp_comm.ports.Rendezvous` over a store of torch.distributed.

    Args:
        store: Reached by all ranks of the job.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, key: str, value: bytes) -> None:
        """Store a value once."""
        self._store.set(key, value.hex())

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """Return the value as soon as somebody stored it."""
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            raise TimeoutError(f"nobody stored {key!r} within {timeout_s} s") from error
        return bytes.fromhex(self._store.get(key).decode())
