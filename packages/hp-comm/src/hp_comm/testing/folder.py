"""A rendezvous in a folder: for processes of one host, without a framework."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

_POLL_S = 0.002


class FolderRendezvous:
    """Implements `hp_comm.ports.Rendezvous` with one file per key.

    Args:
        folder: An existing folder that all ranks see and nothing else uses.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     FolderRendezvous(folder).put("a/b", b"value")
        ...     FolderRendezvous(folder).wait_for("a/b", timeout_s=1)
        b'value'
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)

    def put(self, key: str, value: bytes) -> None:
        """Store a value once; readers see all of it or nothing."""
        draft = self._folder / f"draft-{uuid.uuid4().hex}"
        draft.write_bytes(value)
        draft.rename(self._path(key))

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """Return the value as soon as somebody stored it.

        Raises:
            TimeoutError: Nobody did in time.
        """
        deadline = time.monotonic() + timeout_s
        path = self._path(key)
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody stored {key!r} within {timeout_s} s")
            time.sleep(_POLL_S)
        return path.read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / f"key-{key.encode().hex()}"
