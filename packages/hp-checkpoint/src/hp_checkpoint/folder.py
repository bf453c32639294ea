"""Names and life of the files in and beside a checkpoint's folder.

    name                                      what it is                        goes when
    manifest.json                             the manifest                      replaced, atomically
    data-<token>-<rank>.safetensors           data of the save with this token  no longer named
    .hp-saving-<token>-<ranks>                in the folder: a save is on here  the save ended
    .hp-manifest-<token>                      the next manifest, not yet one    the save ended
    .<folder>.hp-saving-<token>               beside it: a new folder being     renamed to <folder>
                                              written
    .hp-lock or .<folder>.hp-lock             who may save (in it, beside it)   its owner ended

Only the owner of the lock removes anything, and only what these names and the manifest prove to be
ours. The mark `.hp-saving-...` is there before the first data file of its token, and a manifest
lists the files that it replaced, so whatever a killed save leaves can be told from others' files.
A data file is locked by whoever writes it: files of a living rank stay, even if its job's owner of
the lock died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path

from hp_checkpoint.check import DATA_NAME
from hp_checkpoint.errors import ExistsError, ManifestError, NotFoundError

MANIFEST = "manifest.json"
"""What the manifest is called."""
MAX_MANIFEST_BYTES = 1 << 30
"""A larger manifest is refused."""

_MARK = re.compile(r"\.hp-saving-([0-9a-f]{16})-([0-9]{1,9})")
_NEXT = re.compile(r"\.hp-manifest-([0-9a-f]{16})")
_TEMPORARY = re.compile(r"\.(.+)\.hp-saving-[0-9a-f]{16}")
_TOKEN_LENGTH = 16


def next_manifest_name(token: str) -> str:
    """Return the name of a manifest that is about to replace another.

    Example:
        >>> next_manifest_name("0123456789abcdef")
        '.hp-manifest-0123456789abcdef'
    """
    return f".hp-manifest-{token}"


def data_name(token: str, rank: int) -> str:
    """Return the name of a rank's data file.

    Example:
        >>> data_name("0123456789abcdef", 3)
        'data-0123456789abcdef-00003.safetensors'
    """
    return f"data-{token}-{rank:05d}.safetensors"


def mark_name(token: str, world_size: int) -> str:
    """Return the name of the mark of a save into an existing folder.

    Example:
        >>> mark_name("0123456789abcdef", 2)
        '.hp-saving-0123456789abcdef-2'
    """
    return f".hp-saving-{token}-{world_size}"


def temporary_folder(target: Path, token: str) -> Path:
    """Return where a new folder is written before it is renamed.

    Example:
        >>> temporary_folder(Path("/a/step-1"), "0123456789abcdef").name
        '.step-1.hp-saving-0123456789abcdef'
    """
    return target.parent / f".{target.name}.hp-saving-{token}"


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the absolute folder that a path means, through links.

    Raises:
        ExistsError: There is something else than a folder.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise ExistsError(f"{target} is a file; a checkpoint is a folder. Choose another path.")
    if not target.name:
        raise ExistsError(f"{target} can't be a checkpoint's folder. Choose another path.")
    return target


def read_manifest(folder: Path) -> bytes:
    """Return the content of a folder's manifest.

    Raises:
        NotFoundError: There is none.
        ManifestError: It is a link, no regular file, or absurdly large.
    """
    try:
        descriptor = open_inside(folder, MANIFEST)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no checkpoint at {folder}: there is no {MANIFEST}. Pass a folder that save() "
            f"completed."
        ) from error
    except OSError as error:
        raise ManifestError(f"{folder / MANIFEST} can't be opened: {error}.") from error
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{folder / MANIFEST} has {size} bytes; the most is 2**30.")
        return file.read()


def open_inside(folder: Path, name: str) -> int:
    """Open a regular file of a folder for reading; never follows a link at its name.

    Returns:
        A descriptor that the caller closes.

    Raises:
        OSError: It isn't there, is a link, or is no regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(folder / name, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{folder / name} is no regular file")
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_parents(folder: Path) -> None:
    """Make a folder and what is missing above it, durably."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and make its content durable; its name is up to `sync_folder`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file if it is there and nobody alive is writing it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, a link, or not ours to read
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # locked by its writer, or gone
        return
    finally:
        os.close(descriptor)


def remove_temporary(folder: Path) -> None:
    """Remove a temporary folder of a dead save, if nothing but ours is in it.

    Args:
        folder: As from `temporary_folders`; the caller owns the lock of its target.
    """
    token = folder.name[-_TOKEN_LENGTH:]
    for name in os.listdir(folder):
        if name == MANIFEST or _token(DATA_NAME, name) == token:
            remove(folder / name)
    with contextlib.suppress(OSError):  # somebody's file is in it
        os.rmdir(folder)


def remove_unnamed(target: Path, named: frozenset[str], replaced: frozenset[str]) -> None:
    """Remove what dead saves left in a checkpoint's folder. The caller owns the lock.

    Args:
        target: The folder.
        named: Data files that the manifest there names; these stay.
        replaced: Data files that this manifest replaced.
    """
    for name in sorted(replaced - named):
        remove(target / name)
    for mark in os.listdir(target):
        found = _MARK.fullmatch(mark)
        if found is None:
            continue
        for name in _of_token(target, found[1], named):
            remove(target / name)
        if not _of_token(target, found[1], named):
            remove(target / mark)


def temporary_folders(parent: Path) -> list[tuple[str, Path]]:
    """Return the temporary folders in a folder, each with the name of its target."""
    found = ((_TEMPORARY.fullmatch(name), parent / name) for name in sorted(os.listdir(parent)))
    return [
        (match[1], folder)
        for match, folder in found
        if match and folder.is_dir() and not folder.is_symlink()
    ]


def _of_token(target: Path, token: str, named: frozenset[str]) -> list[str]:
    """Return the unnamed files of a folder that belong to one save."""
    return [
        name
        for name in os.listdir(target)
        if token in (_token(DATA_NAME, name), _token(_NEXT, name)) and name not in named
    ]


def _token(pattern: re.Pattern[str], name: str) -> str | None:
    found = pattern.fullmatch(name)
    return found[1] if found else None
