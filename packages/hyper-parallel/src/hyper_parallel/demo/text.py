"""Which files are trained on, which are kept for validation, and in which order windows come.

Pure but for reading files. Whole files go to one side, by a hash of their relative path, so the
split is the same on every machine and in every run; a file whose bytes were seen under another
name is left out, so nothing that is trained on is validated on. The windows of the training text
come in a fixed random order that depends on nothing but the seed, and a position in that order
(a count of sequences) is all that a checkpoint has to keep.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.errors import DemoError

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Not text, or not part of the library whose folder this is."""
STDLIB_SKIPPED_FOLDERS = SKIPPED_FOLDERS | {"test", "tests", "idle_test"}
"""Many distributions leave the library's own tests out; so that all learn the same, we do too."""
END_OF_FILE = b"\0"
VALIDATION_SHARE = 16
"""One file in so many is kept for validation."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text of one folder, split by whole files."""

    train: bytes
    """All training files, each ended by a zero byte."""
    validation: bytes
    """All validation files, each ended by a zero byte."""
    train_files: tuple[str, ...]
    """Paths below the folder, in the order of `train`."""
    validation_files: tuple[str, ...]
    """Paths below the folder, in the order of `validation`."""


def read_stdlib() -> Corpus:
    """Read the sources and docs of the Python standard library that runs this.

    Returns:
        Some 10 MB of text.

    Raises:
        DemoError: The library's sources aren't installed.

    Example:
        >>> "argparse.py" in read_stdlib().train_files + read_stdlib().validation_files
        True
    """
    return read_folder(Path(sysconfig.get_path("stdlib")), skipped=STDLIB_SKIPPED_FOLDERS)


def read_folder(folder: Path, *, skipped: frozenset[str] = SKIPPED_FOLDERS) -> Corpus:
    """Read all text files below a folder and split them.

    Hidden files, links to folders and files that hold a zero byte are left out.

    Args:
        folder: Where to look.
        skipped: Names of folders to leave out.

    Returns:
        The text.

    Raises:
        DemoError: No such folder, a file can't be read, or there are fewer than 2 text files.
    """
    if not folder.is_dir():
        raise DemoError(f"--text {str(folder)!r} isn't a folder: pass one that holds text files.")
    contents: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for path in _files_below(folder, skipped):
        content = _read(path)
        digest = hashlib.sha256(content).digest()
        if not content or END_OF_FILE in content or digest in seen:
            continue
        seen.add(digest)
        contents[path.relative_to(folder).as_posix()] = content
    if len(contents) < 2:  # noqa: PLR2004 - one file for each side
        raise DemoError(
            f"--text {str(folder)!r} holds {len(contents)} different text files: at least 2 are "
            f"needed, one to train on and one to validate on."
        )
    return _split(contents)


def _files_below(folder: Path, skipped: frozenset[str]) -> list[Path]:
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in skipped and not name.startswith(".")
        )
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DemoError(f"{str(path)!r} can't be read: {error.strerror}.") from error


def _split(contents: dict[str, bytes]) -> Corpus:
    order = sorted(contents, key=_path_number)
    validation = [name for name in order if _path_number(name) < 2**64 // VALIDATION_SHARE]
    if not validation:
        validation = order[:1]
    elif len(validation) == len(order):
        validation = order[:-1]
    kept = set(validation)
    train_files = tuple(name for name in contents if name not in kept)
    validation_files = tuple(name for name in contents if name in kept)
    return Corpus(
        train=b"".join(contents[name] + END_OF_FILE for name in train_files),
        validation=b"".join(contents[name] + END_OF_FILE for name in validation_files),
        train_files=train_files,
        validation_files=validation_files,
    )


def _path_number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def count_windows(num_bytes: int, context: int) -> int:
    """Return how many sequences a text holds; each needs one byte more than its length.

    Args:
        num_bytes: Length of the text, in bytes.
        context: Length of a sequence, in bytes.

    Returns:
        Number of whole sequences.

    Example:
        >>> count_windows(257, 128), count_windows(256, 128), count_windows(0, 128)
        (2, 1, 0)
    """
    return max(0, num_bytes - 1) // context


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The order in which the windows of a text are trained on; endless, new in every round.

    Example:
        >>> order = WindowOrder(num_windows=3, seed=0)
        >>> sorted(order.windows(position=0, count=3))
        [0, 1, 2]
        >>> order.windows(position=0, count=4)[2:] == order.windows(position=2, count=2)
        True
    """

    num_windows: int
    """Windows in the text, at least 1."""
    seed: int
    """Decides the order."""

    def windows(self, position: int, count: int) -> list[int]:
        """Return the numbers of `count` windows from a position on."""
        places = (divmod(place, self.num_windows) for place in range(position, position + count))
        return [_shuffled(self.num_windows, self.seed, turn)[place] for turn, place in places]


@functools.lru_cache(maxsize=2)
def _shuffled(num_windows: int, seed: int, turn: int) -> list[int]:
    windows = list(range(num_windows))
    random.Random(f"{seed}/{turn}").shuffle(windows)
    return windows


def spread_windows(num_windows: int, count: int) -> list[int]:
    """Return `count` windows spread evenly over a text; some repeat where it holds fewer.

    Args:
        num_windows: Windows in the text, at least 1.
        count: How many are wanted.

    Returns:
        Window numbers, ascending.

    Example:
        >>> spread_windows(10, 4), spread_windows(2, 4)
        ([0, 2, 5, 7], [0, 0, 1, 1])
    """
    return [index * num_windows // count for index in range(count)]
