"""Reads byte ranges of data files, and checks blocks against their checksums.

Only ranges that are asked for are read, by `pread` into memory of the caller: a file that shrinks
meanwhile gives an error, never a signal. Files are opened once and kept open, so a checkpoint that
is replaced during a load stays readable.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import xxhash

from hp_checkpoint.errors import DamageError
from hp_checkpoint.folder import open_inside
from hp_checkpoint.ranges import blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from hp_checkpoint.manifest import Manifest, Piece

READ_BYTES = 1 << 23
"""The most that is read at a time."""
_MAX_OPEN = 256


@dataclass(frozen=True, slots=True)
class Damage:
    """Something wrong with a checkpoint's files."""

    kind: Literal["manifest", "missing", "size", "header", "block", "unlisted"]
    """What is wrong."""
    file: str
    """Name of the file in the checkpoint's folder."""
    tensor: str | None
    """Name of the tensor that is hit, if one is."""
    begin: int
    """First byte in the file that is hit."""
    end: int
    """First byte after it."""
    text: str
    """The damage in words."""

    def __str__(self) -> str:
        """Return file, byte range, tensor and what is wrong."""
        tensor = "" if self.tensor is None else f" ({self.tensor})"
        return f"{self.file}, bytes {self.begin} to {self.end}{tensor}: {self.text}"


class DataReader:
    """The data files of one checkpoint.

    Args:
        folder: The checkpoint's folder.
        manifest: Its manifest, checked.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._open: OrderedDict[str, int] = OrderedDict()
        self._scratch = memoryview(b"")
        self.num_bytes_read = 0

    def __enter__(self) -> DataReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def inspect(self, name: str) -> Damage | None:
        """Return what is wrong with a file's size or header, if anything; opens it."""
        listed = self._manifest.files[name]
        try:
            descriptor = self._descriptor(name)
        except OSError as error:
            return Damage("missing", name, None, 0, listed.num_bytes, f"can't be opened: {error}")
        size = os.fstat(descriptor).st_size
        if size != listed.num_bytes:
            low, high = sorted((size, listed.num_bytes))
            text = f"the file has {size} bytes, written were {listed.num_bytes}"
            return Damage("size", name, None, low, high, text)
        header = bytearray(listed.header_bytes)
        self.read_into(name, 0, memoryview(header))
        if xxhash.xxh3_64_hexdigest(header) != listed.header_checksum:
            return Damage("header", name, None, 0, len(header), "the header was changed")
        return None

    def faults(self, tensor: str, piece: Piece, ranges: Iterable[tuple[int, int]]) -> list[Damage]:
        """Check every block that ranges of a piece touch.

        Args:
            tensor: Its name, for errors.
            piece: The piece.
            ranges: Byte ranges, counted from the start of the piece.

        Returns:
            One entry per block whose checksum differs.
        """
        found: list[Damage] = []
        block_bytes = self._manifest.block_bytes
        if not self._scratch:
            self._scratch = memoryview(bytearray(max(READ_BYTES, block_bytes)))
        per_read = max(1, READ_BYTES // block_bytes)
        for block, last in _portions(blocks_of(ranges, block_bytes), per_read):
            begin = piece.begin + block * block_bytes
            end = min(piece.begin + last * block_bytes, piece.end)
            portion = self._scratch[: end - begin]
            self.read_into(piece.file, begin, portion)
            for index in range(block, last):
                data = portion[(index - block) * block_bytes :][:block_bytes]
                if xxhash.xxh3_64_hexdigest(data) != piece.checksums[index]:
                    start = piece.begin + index * block_bytes
                    stop = start + data.nbytes
                    text = "the bytes differ from what was written"
                    found.append(Damage("block", piece.file, tensor, start, stop, text))
        return found

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill memory from a byte of a file on.

        Args:
            name: The file.
            begin: First byte.
            target: Writable bytes.

        Raises:
            DamageError: The file ends before.
            OSError: The disk fails.
        """
        descriptor = self._descriptor(name)
        while target:
            length = os.preadv(descriptor, [target[:READ_BYTES]], begin)
            if not length:
                raise DamageError(
                    f"{name} ends at byte {begin}; {target.nbytes} more were written. Load an "
                    f"older checkpoint, or restore the file."
                )
            self.num_bytes_read += length
            begin += length
            target = target[length:]

    def close(self) -> None:
        """Close all files; idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, name: str) -> int:
        if name not in self._open:
            if len(self._open) >= _MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = open_inside(self._folder, name)
        self._open.move_to_end(name)
        return self._open[name]


def _portions(runs: Iterable[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    for first, last in runs:
        for start in range(first, last, length):
            yield start, min(start + length, last)
