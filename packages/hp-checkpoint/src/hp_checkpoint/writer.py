"""Writes one rank's data file, with a checksum per block, without a copy where memory allows.

Bytes of tensors that lie in row-major order in host memory go to the file as they are; others are
made so in portions of `PORTION_BYTES`, so a save needs no more memory than that.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.manifest import BLOCK_BYTES, DataFile
from hp_checkpoint.ranges import Limits, index_of, slabs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hp_checkpoint.ports import Arrays, TensorInfo
    from hp_checkpoint.shardfile import FileLayout
    from hp_mesh import Box

PORTION_BYTES = 1 << 23
"""The most that is copied at a time."""
_MAX_VIEWS = 512  # a call takes up to 1024 (IOV_MAX)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that parts are taken from."""

    tensor: object
    """The framework's object."""
    info: TensorInfo
    """What it is."""


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    file: DataFile
    """The file."""
    checksums: tuple[tuple[str, ...], ...]
    """Per part of the layout, the checksum of each block."""


class DataFileWriter:
    """A data file that this process is writing; locked against cleaners until closed.

    Args:
        path: A path at which there is nothing.

    Raises:
        OSError: It can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks on this file system: only the lock of the path protects it
            return

    def write(self, layout: FileLayout, sources: dict[str, Source], arrays: Arrays) -> Written:
        """Write all parts, then wait until they are durable.

        Args:
            layout: Where parts lie.
            sources: The tensors, by name.
            arrays: Opens them.

        Raises:
            OSError: The disk is full or fails.
        """
        pending = _Pending(self._descriptor)
        pending.add(memoryview(layout.header))
        checksums: list[tuple[str, ...]] = []
        for part in layout.parts:
            blocks = _Blocks()
            for chunk in chunks(sources[part.name], part.box, arrays):
                for block in blocks.cut(chunk):
                    pending.add(block)
            checksums.append(blocks.close())
        pending.flush()
        os.fsync(self._descriptor)
        header = xxhash.xxh3_64_hexdigest(layout.header)
        file = DataFile(layout.num_bytes, len(layout.header), header)
        return Written(file, tuple(checksums))

    def close(self) -> None:
        """Let go of the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        """Close and remove the file."""
        self.close()
        self._path.unlink(missing_ok=True)


def chunks(source: Source, box: Box, arrays: Arrays) -> Iterator[memoryview]:
    """Yield the bytes of a part of a tensor in row-major order.

    Args:
        source: The tensor.
        box: Which part, in coordinates of the full tensor; this rank holds it.
        arrays: Opens the tensor.
    """
    region = box.relative_to(source.info.box)
    if not region.num_elements:
        return
    view = arrays.view(source.tensor)
    if view is not None:
        whole = view[index_of(region)]
        if whole.flags.c_contiguous:
            data = as_bytes(whole)
            for start in range(0, len(data), PORTION_BYTES):
                yield data[start : start + PORTION_BYTES]
            return
    itemsize = DTYPES[source.info.dtype].itemsize
    limits = Limits(slab_bytes=PORTION_BYTES, gap_bytes=1 << 62)
    base = region.offsets
    for slab in slabs(region.sizes, _at_origin(region), itemsize, limits):
        part = _moved(slab.region, base)
        if view is None:
            yield as_bytes(arrays.read(source.tensor, part))
        else:
            yield as_bytes(np.ascontiguousarray(view[index_of(part)]))


def digest(source: Source, arrays: Arrays) -> str:
    """Return a digest of this rank's part of a tensor, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks(source, source.info.box, arrays):
        hasher.update(chunk)
    return hasher.hexdigest()


def as_bytes(values: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array as bytes.

    Example:
        >>> as_bytes(np.zeros((2, 3), "u4")).nbytes
        24
    """
    return values.reshape(-1).view(np.uint8).data


def _at_origin(region: Box) -> Box:
    return region.relative_to(region)


def _moved(region: Box, by: tuple[int, ...]) -> Box:
    offsets = tuple(offset + more for offset, more in zip(region.offsets, by, strict=True))
    return type(region)(offsets, region.sizes)


class _Pending:
    """Bytes that are not in the file yet: many small ones go in one call."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._views: list[memoryview] = []
        self._num_bytes = 0

    def add(self, view: memoryview) -> None:
        self._views.append(view)
        self._num_bytes += view.nbytes
        if self._num_bytes >= BLOCK_BYTES or len(self._views) >= _MAX_VIEWS:
            self.flush()

    def flush(self) -> None:
        views = self._views
        while views:
            written = os.writev(self._descriptor, views)
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if written:
                views[0] = views[0][written:]
        self._num_bytes = 0


class _Blocks:
    """Cuts the bytes of a part at block borders and keeps each block's checksum."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self._filled = 0
        self._checksums: list[str] = []

    def cut(self, chunk: memoryview) -> Iterator[memoryview]:
        while chunk:
            block = chunk[: BLOCK_BYTES - self._filled]
            self._hasher.update(block)
            self._filled += block.nbytes
            if self._filled == BLOCK_BYTES:
                self._end()
            yield block
            chunk = chunk[block.nbytes :]

    def close(self) -> tuple[str, ...]:
        if self._filled:
            self._end()
        return tuple(self._checksums)

    def _end(self) -> None:
        self._checksums.append(self._hasher.hexdigest())
        self._hasher.reset()
        self._filled = 0
