"""The manifest: what a checkpoint holds and where, as values and as one JSON file.

The file begins with exactly

    {"format":"hp-checkpoint","version":1,"xxh3_128":"<32 hex digits>",

and the checksum is that of the whole file with these 32 digits replaced by zeros, so any changed
byte shows. `docs/concepts/checkpoint-format.md` describes the rest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import xxhash

from hp_checkpoint.errors import ManifestError, VersionError
from hp_checkpoint.ports import NoArrays
from hp_checkpoint.tree import name_of, path_from_json, path_to_json
from hp_checkpoint.value import json_text
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hp_checkpoint.ports import Json
    from hp_checkpoint.tree import Path

VERSION = 1
"""The format that this version writes, and the newest that it reads."""
BLOCK_BYTES = 1 << 20
"""How many bytes one checksum covers."""

_HEAD = re.compile(
    rb'\{"format":"hp-checkpoint","version":([0-9]{1,9}),"xxh3_128":"([0-9a-f]{32})",'
)
_ZEROS = "0" * 32
_MAX_INT = 1 << 63


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, stored in one file in row-major order."""

    box: Box
    """Which part of the tensor it is."""
    file: str
    """Name of the data file in the checkpoint's folder."""
    begin: int
    """First byte in the file."""
    end: int
    """First byte after it."""
    checksums: tuple[str, ...]
    """xxh3_64 of each block, 16 hex digits; blocks are counted from `begin`."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A saved tensor."""

    path: Path
    """Its place in the state dict."""
    dtype: str
    """Name of the data type, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Lengths of the dims, in elements."""
    pieces: tuple[Piece, ...]
    """Non-empty boxes that tile the tensor."""
    rank: int | None = None
    """Set where the ranks' values differed: whose it is."""

    @property
    def name(self) -> str:
        """Its path as text."""
        return name_of(self.path)


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A saved plain value."""

    path: Path
    """Its place in the state dict."""
    content: Json
    """The value as `value.encode` wrote it."""
    rank: int | None = None
    """Set where the ranks' values differed: whose it is."""

    @property
    def name(self) -> str:
        """Its path as text."""
        return name_of(self.path)


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, in safetensors layout."""

    num_bytes: int
    """Its size."""
    header_bytes: int
    """Length of the header with its 8-byte prefix; data starts there."""
    header_checksum: str
    """xxh3_64 of these bytes, 16 hex digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds and where."""

    world_size: int
    """How many ranks saved it."""
    block_bytes: int
    """How many bytes one checksum covers."""
    files: Mapping[str, DataFile]
    """Data files by name."""
    leaves: tuple[TensorEntry | ValueEntry, ...]
    """Tensors and values, in the order of the state dict."""
    replaces: tuple[str, ...] = ()
    """Data files of the checkpoint that this one took the place of."""
    software: str = ""
    """Name and version of what wrote it."""


def to_bytes(manifest: Manifest) -> bytes:
    """Return a manifest as the content of its file.

    Example:
        >>> to_bytes(Manifest(1, 1 << 20, {}, ()))[:41]
        b'{"format":"hp-checkpoint","version":1,"xx'
    """
    body: dict[str, Json] = {
        "software": manifest.software,
        "world_size": manifest.world_size,
        "block_bytes": manifest.block_bytes,
        "replaces": list(manifest.replaces),
        "files": {
            name: {
                "bytes": file.num_bytes,
                "header_bytes": file.header_bytes,
                "header_xxh3_64": file.header_checksum,
            }
            for name, file in manifest.files.items()
        },
        "leaves": [_leaf_to_json(leaf) for leaf in manifest.leaves],
    }
    head = f'{{"format":"hp-checkpoint","version":{VERSION},"xxh3_128":"{_ZEROS}",'
    text = (head + json_text(body)[1:] + "\n").encode("ascii")
    digest = xxhash.xxh3_128_hexdigest(text).encode("ascii")
    return text.replace(_ZEROS.encode("ascii"), digest, 1)


def from_bytes(data: bytes) -> Manifest:
    """Return the manifest in a file's content. Its consistency is checked elsewhere.

    Args:
        data: The whole file; may be damaged or hostile.

    Raises:
        VersionError: A newer format.
        ManifestError: Damaged, or not of this format.

    Example:
        >>> from_bytes(to_bytes(Manifest(3, 1 << 20, {}, ()))).world_size
        3
    """
    head = _HEAD.match(data)
    if head is None:
        raise ManifestError(
            "the manifest doesn't start as one of hp-checkpoint does: it is damaged, cut, or the "
            "file of another program. Verify the checkpoint or load an older one."
        )
    zeroed = data[: head.start(2)] + _ZEROS.encode("ascii") + data[head.end(2) :]
    found = xxhash.xxh3_128_hexdigest(zeroed).encode("ascii")
    if int(head[1]) > VERSION:
        raise VersionError(
            f"the manifest is of format version {int(head[1])}; this hp-checkpoint reads up to "
            f"{VERSION}. Install a newer one."
        )
    if found != head[2]:
        raise ManifestError(
            f"the manifest is damaged: its checksum is {found.decode()}, it says "
            f"{head[2].decode()}. Load an older checkpoint."
        )
    try:
        body = json.loads(data, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the manifest can't be parsed: {error}") from error
    return _manifest_from_json(body)


def integer(content: Json, what: str) -> int:
    """Return JSON that must be a count: an integer from 0 to 2**63 - 1.

    Raises:
        ManifestError: It is something else.

    Example:
        >>> integer(3, "bytes")
        3
    """
    if type(content) is not int or not 0 <= content < _MAX_INT:
        _refuse(what, "a count", content)
    return content


def _leaf_to_json(leaf: TensorEntry | ValueEntry) -> Json:
    content: dict[str, Json] = {"path": path_to_json(leaf.path, NoArrays())}
    if leaf.rank is not None:
        content["rank"] = leaf.rank
    if isinstance(leaf, ValueEntry):
        return {**content, "value": leaf.content}
    pieces: list[Json] = [
        {
            "offsets": list(piece.box.offsets),
            "sizes": list(piece.box.sizes),
            "file": piece.file,
            "begin": piece.begin,
            "end": piece.end,
            "xxh3_64": list(piece.checksums),
        }
        for piece in leaf.pieces
    ]
    return {**content, "dtype": leaf.dtype, "shape": list(leaf.shape), "pieces": pieces}


def _no_twins(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} isn't JSON")


def _manifest_from_json(body: Json) -> Manifest:
    top = _object(body, "the manifest")
    files = _object(_field(top, "files"), "files")
    return Manifest(
        world_size=integer(_field(top, "world_size"), "world_size"),
        block_bytes=integer(_field(top, "block_bytes"), "block_bytes"),
        files={name: _file_from_json(content) for name, content in files.items()},
        leaves=tuple(_leaf_from_json(leaf) for leaf in _array(_field(top, "leaves"), "leaves")),
        replaces=tuple(
            _text(name, "replaces") for name in _array(_field(top, "replaces"), "replaces")
        ),
        software=_text(_field(top, "software"), "software"),
    )


def _file_from_json(content: Json) -> DataFile:
    fields = _object(content, "a file")
    return DataFile(
        num_bytes=integer(_field(fields, "bytes"), "bytes"),
        header_bytes=integer(_field(fields, "header_bytes"), "header_bytes"),
        header_checksum=_text(_field(fields, "header_xxh3_64"), "header_xxh3_64"),
    )


def _leaf_from_json(content: Json) -> TensorEntry | ValueEntry:
    fields = _object(content, "a leaf")
    path = path_from_json(_field(fields, "path"), NoArrays())
    rank = integer(fields["rank"], "rank") if "rank" in fields else None
    if "value" in fields:
        return ValueEntry(path, fields["value"], rank)
    pieces = _array(_field(fields, "pieces"), "pieces")
    return TensorEntry(
        path=path,
        dtype=_text(_field(fields, "dtype"), "dtype"),
        shape=_integers(_field(fields, "shape"), "shape"),
        pieces=tuple(_piece_from_json(piece) for piece in pieces),
        rank=rank,
    )


def _piece_from_json(content: Json) -> Piece:
    fields = _object(content, "a piece")
    offsets = _integers(_field(fields, "offsets"), "offsets")
    sizes = _integers(_field(fields, "sizes"), "sizes")
    if len(offsets) != len(sizes):
        _refuse("a piece", "as many offsets as sizes", content)
    return Piece(
        box=Box(offsets, sizes),
        file=_text(_field(fields, "file"), "file"),
        begin=integer(_field(fields, "begin"), "begin"),
        end=integer(_field(fields, "end"), "end"),
        checksums=tuple(
            _text(one, "xxh3_64") for one in _array(_field(fields, "xxh3_64"), "xxh3_64")
        ),
    )


def _refuse(what: str, wanted: str, found: object) -> NoReturn:
    shown = repr(found)
    shown = shown if len(shown) < 100 else shown[:97] + "..."  # noqa: PLR2004  # one line
    raise ManifestError(f"{what} of the manifest should be {wanted}; found {shown}.")


def _object(content: Json, what: str) -> dict[str, Json]:
    if not isinstance(content, dict):
        _refuse(what, "an object", content)
    return content


def _field(fields: dict[str, Json], key: str) -> Json:
    if key not in fields:
        _refuse(key, "there", sorted(fields))
    return fields[key]


def _array(content: Json, what: str) -> list[Json]:
    if not isinstance(content, list):
        _refuse(what, "a list", content)
    return content


def _integers(content: Json, what: str) -> tuple[int, ...]:
    return tuple(integer(item, what) for item in _array(content, what))


def _text(content: Json, what: str) -> str:
    if not isinstance(content, str):
        _refuse(what, "text", content)
    return content
