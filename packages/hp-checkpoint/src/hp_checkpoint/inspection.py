"""Looks at a checkpoint without loading it into anything: its manifest and all its damages."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import xxhash

from hp_checkpoint.errors import DamageError, ManifestError, NotFoundError
from hp_checkpoint.folder import MANIFEST, resolve
from hp_checkpoint.loading import read_checked
from hp_checkpoint.manifest import TensorEntry
from hp_checkpoint.reader import Damage, DataReader
from hp_checkpoint.shardfile import Part, lay_out

if TYPE_CHECKING:
    from hp_checkpoint.manifest import Manifest


def read_metadata(path: str | os.PathLike[str]) -> Manifest:
    """Return what a checkpoint says of itself; reads the manifest only.

    Args:
        path: The checkpoint's folder.

    Raises:
        NotFoundError: There is no checkpoint.
        ManifestError: The manifest is damaged or inconsistent.

    Example:
        >>> import tempfile
        >>> import hp_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> hp_checkpoint.save({"step": 3}, folder)
        >>> [leaf.name for leaf in read_metadata(folder).leaves]
        ['step']
    """
    return read_checked(resolve(path))[0]


def verify(path: str | os.PathLike[str]) -> list[Damage]:
    """Read a whole checkpoint and return everything that is wrong with it.

    Args:
        path: The checkpoint's folder.

    Returns:
        Damages in order of file and byte; files in the folder that the manifest doesn't list are
        among them, as kind "unlisted": they are harmless to a load.

    Raises:
        NotFoundError: There is no checkpoint.

    Example:
        >>> import tempfile
        >>> import hp_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> hp_checkpoint.save({"step": 3}, folder)
        >>> verify(folder)
        []
    """
    folder = resolve(path)
    try:
        manifest, _ = read_checked(folder)
    except NotFoundError:
        raise
    except ManifestError as error:
        return [Damage("manifest", MANIFEST, None, 0, _size(folder / MANIFEST), str(error))]
    damages: list[Damage] = []
    with DataReader(folder, manifest) as reader:
        for name in sorted(manifest.files):
            damages += _damages_of_file(name, manifest, reader)
    for name in sorted(os.listdir(folder)):
        if name != MANIFEST and name not in manifest.files:
            text = "the manifest doesn't list this"
            damages.append(Damage("unlisted", name, None, 0, _size(folder / name), text))
    return damages


def _size(path: str | os.PathLike[str]) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _damages_of_file(name: str, manifest: Manifest, reader: DataReader) -> list[Damage]:
    damages: list[Damage] = []
    wrong = reader.inspect(name)
    if wrong is not None:
        damages.append(wrong)
        if wrong.kind == "missing":
            return damages
    elif not _header_fits(name, manifest):
        size = manifest.files[name].header_bytes
        damages.append(
            Damage("header", name, None, 0, size, "the header says other things than the manifest")
        )
    found = [
        (piece.begin, leaf.name, piece)
        for leaf in manifest.leaves
        if isinstance(leaf, TensorEntry)
        for piece in leaf.pieces
        if piece.file == name
    ]
    for _, tensor, piece in sorted(found, key=lambda one: one[0]):
        length = piece.end - piece.begin
        try:
            damages += reader.faults(tensor, piece, [(0, length)])
        except DamageError as error:
            damages.append(Damage("size", name, tensor, piece.begin, piece.end, str(error)))
        except OSError as error:
            text = f"can't be read: {error}"
            damages.append(Damage("missing", name, tensor, piece.begin, piece.end, text))
    return damages


def _header_fits(name: str, manifest: Manifest) -> bool:
    """Tell whether the header is the one that follows from the manifest."""
    parts = [
        Part(leaf.name, leaf.rank, leaf.dtype, leaf.shape, piece.box)
        for leaf in manifest.leaves
        if isinstance(leaf, TensorEntry)
        for piece in leaf.pieces
        if piece.file == name
    ]
    header = lay_out(parts).header
    return xxhash.xxh3_64_hexdigest(header) == manifest.files[name].header_checksum
