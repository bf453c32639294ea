"""One saver per path: an advisory lock that dies with its owner.

The lock is flock on a small file in the folder, or beside it while there is no folder. The kernel
drops it when the owner ends, however it ends. The file is removed by its owner at release, and an
owner that finds the file gone or exchanged after locking starts again, so no two hold one path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import time
import warnings
from typing import TYPE_CHECKING

from hp_checkpoint.errors import LockedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 1.0
"""How long a busy lock is asked for again: others hold it for moments to look for leftovers."""

_PAUSE_S = 0.02
_WORD = b"process "  # a lock file starts with it
_LOCK = ".hp-lock"
LOCK_NAME = re.compile(r"\..+\.hp-lock")
"""What a lock beside a folder is called."""
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_held: set[int] = set()


def beside(target: Path) -> Path:
    """Return where the lock is while there is no folder.

    Example:
        >>> from pathlib import Path
        >>> beside(Path("/a/step-1")).name
        '.step-1.hp-lock'
    """
    return target.parent / f".{target.name}{_LOCK}"


def lock_file(target: Path) -> Path:
    """Return where the lock of a checkpoint's folder is now.

    Example:
        >>> from pathlib import Path
        >>> lock_file(Path("/no-such-folder/step-1")).name
        '.step-1.hp-lock'
    """
    return target / _LOCK if target.is_dir() else beside(target)


class PathLock:
    """The right to save to one path; hold it from before the first change to after the last.

    Args:
        target: The checkpoint's folder; need not exist, but its parent must.
        patience_s: How long to ask again while it is busy, in seconds.

    Raises:
        LockedError: Another process, or another thread of this one, holds it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> lock = PathLock(Path(tempfile.mkdtemp()) / "step-1")
        >>> lock.release()
    """

    def __init__(self, target: Path, *, patience_s: float = PATIENCE_S) -> None:
        self._target = target
        self.file = lock_file(target)
        deadline = time.monotonic() + patience_s
        while True:
            self.file = lock_file(target)
            descriptor = self._try()
            if descriptor is not None:
                self._descriptor = descriptor
                _held.add(descriptor)
                return
            if time.monotonic() >= deadline:
                raise LockedError(
                    f"another job is saving to {target}: {_owner(self.file)}. Wait until it is "
                    f"done, or choose another path."
                )
            time.sleep(_PAUSE_S)

    def _try(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.file, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(descriptor)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise
            warnings.warn(
                f"the file system of {self.file} has no locks: make sure that one job at a time "
                f"saves there.",
                stacklevel=2,
            )
        if not self._is_current(descriptor):
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _WORD + f"{os.getpid()} on {socket.gethostname()}\n".encode())
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        """Tell whether the locked file is still the one at the path, and the path the right one."""
        try:
            there = os.stat(self.file, follow_symlinks=False)
        except FileNotFoundError:
            return False
        own = os.fstat(descriptor)
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            return False
        if lock_file(self._target) == self.file:
            return True
        os.unlink(self.file)  # the folder came to be meanwhile: its lock is inside
        return False

    def release(self) -> None:
        """Let others save; idempotent."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        _held.discard(descriptor)
        with contextlib.suppress(OSError):  # a read-only disk: the lock ends all the same
            if os.path.samestat(os.fstat(descriptor), os.lstat(self.file)):
                os.unlink(self.file)
        os.close(descriptor)


@contextlib.contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Hold a lock file that a dead owner left, and remove it at the end.

    Args:
        file: As from `lock_file`; need not exist.

    Yields:
        Whether its owner is gone. False: it lives, or the file isn't one of ours.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        is_free = _is_free(descriptor)
        yield is_free
        if is_free and os.path.samestat(os.fstat(descriptor), os.lstat(file)):
            os.unlink(file)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    """Lock the file; tell whether that went and the file is one of ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.pread(descriptor, len(_WORD), 0) in (_WORD, b"")


def _owner(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or "it has just begun"
    except OSError:
        return "it has just begun"


def _drop_in_child() -> None:
    """Let go in a forked child: it isn't the owner and may outlive it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)
