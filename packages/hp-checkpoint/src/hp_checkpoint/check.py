"""Is a manifest consistent? What passes here can be read without further doubts.

checked                                        so that
file names are of our pattern                  nothing outside the folder is opened
boxes tile each tensor, sizes fit ranges       every element is stored once
ranges tile each file behind its header        memory is bounded by the size of the files
as many checksums as blocks                    every byte is covered
a name comes once, or once per rank            there is one answer to every question
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.errors import ManifestError
from hp_checkpoint.manifest import TensorEntry
from hp_checkpoint.tiling import fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hp_checkpoint.manifest import Manifest, Piece

DATA_NAME = re.compile(r"data-([0-9a-f]{16})-([0-9]{5,9})\.safetensors")
"""What our data files are called: the save's token and the rank."""

_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_MAX_BLOCK_BYTES = 1 << 24
_MAX_INT = 1 << 63


def check(manifest: Manifest) -> None:
    """Check that a manifest contradicts neither itself nor the rules of the format.

    Raises:
        ManifestError: Names the first tensor or file that is wrong.

    Example:
        >>> from hp_checkpoint.manifest import Manifest
        >>> check(Manifest(1, 1 << 20, {}, ()))
    """
    if not 0 < manifest.block_bytes <= _MAX_BLOCK_BYTES:
        raise ManifestError(f"block_bytes is {manifest.block_bytes}, not 1 to {_MAX_BLOCK_BYTES}.")
    if manifest.world_size < 1:
        raise ManifestError("world_size is 0; somebody must have saved it.")
    for name in (*manifest.files, *manifest.replaces):
        if DATA_NAME.fullmatch(name) is None:
            raise ManifestError(
                f"the manifest names the file {name!r}, which isn't a data file of ours "
                f"({DATA_NAME.pattern}). Nothing was opened."
            )
    _check_names(manifest)
    for leaf in manifest.leaves:
        if isinstance(leaf, TensorEntry):
            _check_tensor(leaf, manifest)
    _check_files(manifest)


def _check_names(manifest: Manifest) -> None:
    ranks: dict[str, set[int | None]] = {}
    for leaf in manifest.leaves:
        if leaf.rank is not None and leaf.rank >= manifest.world_size:
            raise ManifestError(
                f"{leaf.name}: is rank {leaf.rank}'s of {manifest.world_size} ranks."
            )
        seen = ranks.setdefault(leaf.name, set())
        if leaf.rank in seen or None in seen or (leaf.rank is None and seen):
            raise ManifestError(f"{leaf.name}: comes twice.")
        seen.add(leaf.rank)


def _check_tensor(leaf: TensorEntry, manifest: Manifest) -> None:
    dtype = DTYPES.get(leaf.dtype)
    if dtype is None:
        raise ManifestError(f"{leaf.name}: data type {leaf.dtype!r} isn't known here.")
    if prod(max(1, length) for length in leaf.shape) * dtype.itemsize >= _MAX_INT:
        raise ManifestError(f"{leaf.name}: shape {leaf.shape} is beyond what memory can address.")
    wrong = fault(leaf.shape, [piece.box for piece in leaf.pieces])
    if wrong is not None:
        raise ManifestError(f"{leaf.name}: its pieces don't tile shape {leaf.shape}: {wrong}.")
    for piece in leaf.pieces:
        _check_piece(leaf.name, piece, dtype.itemsize, manifest)


def _check_piece(name: str, piece: Piece, itemsize: int, manifest: Manifest) -> None:
    file = manifest.files.get(piece.file)
    if file is None:
        raise ManifestError(f"{name}: is in {piece.file!r}, which the manifest doesn't list.")
    length = piece.box.num_elements * itemsize
    if piece.end - piece.begin != length or piece.end > file.num_bytes:
        raise ManifestError(
            f"{name}: bytes {piece.begin} to {piece.end} of {piece.file} can't hold {length} bytes."
        )
    if len(piece.checksums) != -(-length // manifest.block_bytes):
        raise ManifestError(f"{name}: {len(piece.checksums)} checksums for {length} bytes.")
    if not all(_CHECKSUM.fullmatch(checksum) for checksum in piece.checksums):
        raise ManifestError(f"{name}: a checksum isn't 16 hex digits.")


def _check_files(manifest: Manifest) -> None:
    ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in manifest.files}
    for name, piece in _pieces(manifest):
        ranges[piece.file].append((piece.begin, piece.end, name))
    for file, found in ranges.items():
        size, position = manifest.files[file].num_bytes, manifest.files[file].header_bytes
        for begin, end, name in sorted(found):
            if begin != position:
                raise ManifestError(
                    f"{name}: starts at byte {begin} of {file}, where byte {position} is next: "
                    f"ranges overlap or leave a hole."
                )
            position = end
        if position != size:
            raise ManifestError(f"{file}: has {size} bytes, of which {position} are described.")


def _pieces(manifest: Manifest) -> Iterator[tuple[str, Piece]]:
    for leaf in manifest.leaves:
        if isinstance(leaf, TensorEntry):
            for piece in leaf.pieces:
                yield leaf.name, piece
