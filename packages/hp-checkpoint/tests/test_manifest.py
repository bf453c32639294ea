"""The manifest: round trip, damage, and hostile content."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from hp_checkpoint.check import check
from hp_checkpoint.errors import ManifestError, VersionError
from hp_checkpoint.manifest import (
    DataFile,
    Manifest,
    Piece,
    TensorEntry,
    ValueEntry,
    from_bytes,
    to_bytes,
)
from hp_mesh import Box

FILE = "data-0123456789abcdef-00000.safetensors"
SUM = "0" * 16
GOOD = Manifest(
    world_size=2,
    block_bytes=16,
    files={FILE: DataFile(num_bytes=88, header_bytes=48, header_checksum=SUM)},
    leaves=(
        TensorEntry(
            path=(("dict", "a"), ("list", 0)),
            dtype="float32",
            shape=(4, 2),
            pieces=(
                Piece(Box((0, 0), (3, 2)), FILE, 48, 72, (SUM, SUM)),
                Piece(Box((3, 0), (1, 2)), FILE, 72, 80, (SUM,)),
            ),
        ),
        ValueEntry((("dict", "a"), ("list", 1)), {"$tuple": [1, None]}),
        ValueEntry((("dict", "b"),), 1.5, rank=1),
        TensorEntry((("dict", "c"),), "int64", (), (Piece(Box((), ()), FILE, 80, 88, (SUM,)),)),
        TensorEntry((("dict", "e"),), "bool", (0, 3), ()),
    ),
    replaces=(FILE,),
    software="test",
)


def sealed(body: dict[str, Any]) -> bytes:
    """Return a manifest with a right checksum, whatever is in it."""
    head = '{"format":"hp-checkpoint","version":1,"xxh3_128":"' + "0" * 32 + '",'
    text = (head + json.dumps(body)[1:]).encode()
    return text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)


def body_of(manifest: Manifest) -> dict[str, Any]:
    body = json.loads(to_bytes(manifest))
    for key in ("format", "version", "xxh3_128"):
        del body[key]
    return dict(body)


def test_manifest_comes_back_as_it_was() -> None:
    assert from_bytes(to_bytes(GOOD)) == GOOD


def test_manifest_is_one_json_document() -> None:
    found = json.loads(to_bytes(GOOD))

    assert (found["format"], found["version"]) == ("hp-checkpoint", 1)


def test_manifest_with_any_byte_changed_is_refused() -> None:
    data = to_bytes(GOOD)

    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[position] ^= flip
            with pytest.raises(ManifestError):
                from_bytes(bytes(changed))


def test_manifest_cut_anywhere_is_refused() -> None:
    data = to_bytes(GOOD)

    for length in range(len(data)):
        with pytest.raises(ManifestError):
            from_bytes(data[:length])


def test_manifest_of_a_newer_version_names_it() -> None:
    with pytest.raises(VersionError, match="version 2; this hp-checkpoint reads up to 1"):
        from_bytes(to_bytes(GOOD).replace(b'"version":1', b'"version":2'))


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("world_size", -1),
        ("world_size", 1 << 70),
        ("world_size", True),
        ("block_bytes", "16"),
        ("files", []),
        ("files", {FILE: {"bytes": 1}}),
        ("leaves", {}),
        ("leaves", [3]),
        ("leaves", [{"path": ["a"]}]),
        ("leaves", [{"value": 1}]),
        ("leaves", [{"path": ["a"], "dtype": "float32", "shape": [-1], "pieces": []}]),
        ("leaves", [{"path": ["a"], "dtype": "float32", "shape": [1.0], "pieces": []}]),
        ("leaves", [{"path": ["a"], "dtype": "f", "shape": [], "pieces": [{"offsets": [0]}]}]),
        ("leaves", [{"path": ["a"], "value": 1, "rank": -1}]),
        ("replaces", [3]),
        ("software", None),
    ],
)
def test_manifest_with_a_wrong_field_is_refused(key: str, content: object) -> None:
    with pytest.raises(ManifestError, match="should be"):
        from_bytes(sealed({**body_of(GOOD), key: content}))


@pytest.mark.parametrize(
    "text",
    [
        '{"world_size":1,"world_size":2}',
        '{"world_size":NaN}',
        '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"a":1}}',
        "{",
    ],
    ids=["twins", "nan", "deep", "tail", "cut"],
)
def test_manifest_that_is_bad_json_is_refused(text: str) -> None:
    head = '{"format":"hp-checkpoint","version":1,"xxh3_128":"' + "0" * 32 + '",'
    data = (head + text[1:]).encode()
    data = data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode(), 1)

    with pytest.raises(ManifestError, match="parsed"):
        from_bytes(data)


def test_check_of_a_good_manifest_passes() -> None:
    check(GOOD)


def tensor(**changes: Any) -> Manifest:
    return replace(GOOD, leaves=(replace(GOOD.leaves[0], **changes), *GOOD.leaves[1:]))


def piece(**changes: Any) -> Manifest:
    first = GOOD.leaves[0]
    assert isinstance(first, TensorEntry)
    return tensor(pieces=(replace(first.pieces[0], **changes), *first.pieces[1:]))


def named(name: str) -> Manifest:
    return replace(GOOD, files={**GOOD.files, name: DataFile(8, 8, SUM)})


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (named("../data-0123456789abcdef-00000.safetensors"), "isn't a data file of ours"),
        (named("/etc/passwd"), "isn't a data file of ours"),
        (named("data-0123456789abcdef-00000.safetensors\n"), "isn't a data file of ours"),
        (named("a/data-0123456789abcdef-00000.safetensors"), "isn't a data file of ours"),
        (replace(GOOD, replaces=("important.txt",)), "isn't a data file of ours"),
        (replace(GOOD, block_bytes=0), "block_bytes"),
        (replace(GOOD, block_bytes=1 << 40), "block_bytes"),
        (replace(GOOD, world_size=0), "world_size"),
        (replace(GOOD, world_size=1), "b: is rank 1's of 1 ranks"),
        (replace(GOOD, leaves=(*GOOD.leaves, GOOD.leaves[1])), "comes twice"),
        (replace(GOOD, leaves=(*GOOD.leaves, ValueEntry((("dict", "b"),), 1))), "comes twice"),
        (tensor(dtype="float31"), "data type"),
        (tensor(shape=(4, 3)), "don't tile"),
        (tensor(shape=(4,)), "don't tile"),
        (tensor(pieces=()), "don't tile"),
        (tensor(shape=(1 << 40, 1 << 40), pieces=()), "beyond what memory can address"),
        (tensor(shape=(0, 1 << 62, 4), pieces=()), "beyond what memory can address"),
        (piece(box=Box((1, 0), (3, 2))), "don't tile"),
        (piece(file="data-0123456789abcdef-00001.safetensors"), "doesn't list"),
        (piece(end=73), "can't hold"),
        (piece(begin=49), "can't hold"),
        (piece(begin=80, end=104), "can't hold"),
        (piece(begin=56, end=80), "overlap or leave a hole"),
        (piece(checksums=(SUM,)), "1 checksums for 24 bytes"),
        (piece(checksums=(SUM, "x" * 16)), "hex"),
        (replace(GOOD, files={FILE: DataFile(89, 48, SUM)}), "89 bytes, of which 88"),
        (replace(GOOD, files={FILE: DataFile(88, 40, SUM)}), "overlap or leave a hole"),
        (replace(GOOD, files={FILE: DataFile(1 << 62, 48, SUM)}), "are described"),
    ],
)
def test_check_of_an_inconsistent_manifest_is_refused(manifest: Manifest, text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        check(manifest)
