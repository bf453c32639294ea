"""Damaged and hostile checkpoints: always a named error, and nothing is changed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from hp_checkpoint import read_metadata, verify
from hp_checkpoint.errors import CheckpointError, DamageError, ManifestError
from hp_checkpoint.loading import load_all, load_state
from hp_checkpoint.manifest import BLOCK_BYTES, TensorEntry
from hp_checkpoint.ports import Alone
from hp_checkpoint.reader import DataReader
from hp_checkpoint.saving import save_state
from hp_checkpoint.testing import NumpyArrays, plain, shard

if TYPE_CHECKING:
    from pathlib import Path

STATE: dict[Any, Any] = {
    "a": plain(np.arange(30, dtype="f4").reshape(5, 6)),
    "b": plain(np.arange(7, dtype="i2")),
    "v": (1, "x"),
}


def save(state: dict[Any, Any], path: Path) -> None:
    save_state(state, path, peers=Alone(), arrays=NumpyArrays(), overwrite=True)


def load(state: dict[Any, Any], path: Path, *, check: bool = True) -> None:
    load_state(state, path, peers=Alone(), arrays=NumpyArrays(), strict=True, verify=check)


def zeros() -> dict[Any, Any]:
    return {"a": plain(np.zeros((5, 6), "f4")), "b": plain(np.zeros(7, "i2")), "v": None}


def assert_unchanged(state: dict[Any, Any]) -> None:
    assert not state["a"].values.any()
    assert not state["b"].values.any()
    assert state["v"] is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(STATE, tmp_path / "step")
    return tmp_path / "step"


def data_file(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def test_any_flipped_byte_of_data_is_found_and_nothing_is_changed(folder: Path) -> None:
    file = data_file(folder)
    good = file.read_bytes()

    for position in range(len(good)):
        changed = bytearray(good)
        changed[position] ^= 0x10
        file.write_bytes(changed)
        state = zeros()
        found = verify(folder)
        with pytest.raises(DamageError, match=rf"{file.name}, bytes \d+ to \d+.*: "):
            load(state, folder)
        assert_unchanged(state)
        assert len(found) == 1
        assert found[0].begin <= position < found[0].end


def test_any_flipped_byte_of_the_manifest_is_found(folder: Path) -> None:
    file = folder / "manifest.json"
    good = file.read_bytes()

    for position in range(len(good)):
        changed = bytearray(good)
        changed[position] ^= 0x10
        file.write_bytes(changed)
        state = zeros()
        with pytest.raises(ManifestError):
            load(state, folder)
        assert_unchanged(state)
        assert [damage.kind for damage in verify(folder)] == ["manifest"]


@pytest.mark.parametrize("target", ["data", "manifest"])
def test_file_cut_anywhere_is_found(folder: Path, target: str) -> None:
    file = data_file(folder) if target == "data" else folder / "manifest.json"
    good = file.read_bytes()

    for length in range(len(good)):
        file.write_bytes(good[:length])
        state = zeros()
        with pytest.raises(CheckpointError, match=r"bytes|start|damaged"):
            load(state, folder)
        assert_unchanged(state)
        assert verify(folder)


def test_file_with_bytes_added_is_found(folder: Path) -> None:
    with data_file(folder).open("ab") as file:
        file.write(b"x")

    assert [damage.kind for damage in verify(folder)] == ["size"]
    with pytest.raises(DamageError, match="written were"):
        load(zeros(), folder)


def make_missing(file: Path, elsewhere: Path) -> None:
    file.unlink()


def make_link(file: Path, elsewhere: Path) -> None:
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def make_folder(file: Path, elsewhere: Path) -> None:
    file.unlink()
    file.mkdir()


def make_pipe(file: Path, elsewhere: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", [make_missing, make_link, make_folder, make_pipe])
@pytest.mark.parametrize("check", [True, False], ids=["verified", "unverified"])
def test_file_that_is_no_file_is_an_error(folder: Path, change: Any, check: bool) -> None:
    file = data_file(folder)
    change(file, folder.parent / "elsewhere")
    state = zeros()

    with pytest.raises(DamageError, match=f"{file.name}, .*can't be opened"):
        load(state, folder, check=check)

    assert_unchanged(state)
    assert [damage.kind for damage in verify(folder)] == ["missing"]


@pytest.mark.parametrize("change", [make_link, make_folder, make_pipe])
def test_manifest_that_is_no_file_is_an_error(folder: Path, change: Any) -> None:
    change(folder / "manifest.json", folder.parent / "elsewhere")

    with pytest.raises(ManifestError, match="can't be opened"):
        load(zeros(), folder)


def test_swapped_files_are_found(tmp_path: Path) -> None:
    save(STATE, tmp_path / "one")
    save({**STATE, "b": plain(np.ones(7, "i2"))}, tmp_path / "two")
    one, two = data_file(tmp_path / "one"), data_file(tmp_path / "two")
    content = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[1])

    assert len(content[0]) == len(content[1])
    assert [damage.tensor for damage in verify(tmp_path / "one")] == ["b"]


def test_verify_lists_files_that_are_not_the_checkpoints(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")

    assert [(damage.kind, damage.file) for damage in verify(folder)] == [("unlisted", "notes.txt")]
    load(zeros(), folder)


def test_verify_finds_all_damages(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, 5 * BLOCK_BYTES, "u1")
    save({"w": plain(values)}, tmp_path / "step")
    file = data_file(tmp_path / "step")
    content = bytearray(file.read_bytes())
    start = len(content) - values.nbytes
    for block in (0, 3, 4):
        content[start + block * BLOCK_BYTES + 17] ^= 1
    file.write_bytes(content)

    found = verify(tmp_path / "step")

    assert [(damage.begin - start) // BLOCK_BYTES for damage in found] == [0, 3, 4]
    assert {damage.end - damage.begin for damage in found} == {BLOCK_BYTES}


def test_damage_in_bytes_that_a_load_does_not_read_passes_it(tmp_path: Path) -> None:
    rows = np.arange(4 * BLOCK_BYTES, dtype="u1").reshape(4, BLOCK_BYTES)
    save({"w": plain(rows)}, tmp_path / "step")
    file = data_file(tmp_path / "step")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    state = {"w": shard(np.zeros_like(rows), 4, 0)}

    load_state(
        state, tmp_path / "step", peers=Alone(), arrays=NumpyArrays(), strict=True, verify=True
    )

    assert np.array_equal(state["w"].values, rows[:1])
    assert len(verify(tmp_path / "step")) == 1


def rewritten(folder: Path, change: Any) -> None:
    """Change the manifest and give it a right checksum: what an attacker would do."""
    body = json.loads((folder / "manifest.json").read_bytes())
    for key in ("format", "version", "xxh3_128"):
        del body[key]
    change(body)
    head = '{"format":"hp-checkpoint","version":1,"xxh3_128":"' + "0" * 32 + '",'
    text = (head + json.dumps(body)[1:]).encode()
    digest = xxhash.xxh3_128_hexdigest(text).encode()
    (folder / "manifest.json").write_bytes(text.replace(b"0" * 32, digest, 1))


def huge(body: Any) -> None:
    """Declare a tensor of 2**60 bytes, consistently."""
    (name,) = body["files"]
    header = body["files"][name]["header_bytes"]
    body["block_bytes"] = 1 << 24
    body["files"][name]["bytes"] = header + (1 << 40)
    piece = {"offsets": [0], "sizes": [1 << 40], "file": name, "begin": header}
    piece |= {"end": header + (1 << 40), "xxh3_64": ["0" * 16] * (1 << 16)}
    body["leaves"] = [{"path": ["a"], "dtype": "uint8", "shape": [1 << 40], "pieces": [piece]}]


def outside(body: Any) -> None:
    (name,) = body["files"]
    body["files"]["../../secret"] = body["files"].pop(name)
    for leaf in body["leaves"]:
        for piece in leaf.get("pieces", []):
            piece["file"] = "../../secret"


def aliased(body: Any) -> None:
    body["leaves"][1]["pieces"] = body["leaves"][0]["pieces"]


@pytest.mark.parametrize("change", [huge, outside, aliased])
def test_hostile_manifest_is_an_error_before_memory_is_taken(folder: Path, change: Any) -> None:
    rewritten(folder, change)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = zeros()

    with pytest.raises(CheckpointError):
        load(state, folder)
    with pytest.raises(CheckpointError):
        load_all(folder, arrays=NumpyArrays(), verify=True)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert_unchanged(state)
    assert verify(folder)


def test_next_save_never_removes_what_a_hostile_manifest_names(folder: Path) -> None:
    precious = folder / "precious.txt"
    precious.write_text("mine")
    rewritten(folder, lambda body: body["replaces"].append("precious.txt"))

    save(STATE, folder)

    assert precious.read_text() == "mine"


@pytest.mark.parametrize(("num_shards", "index", "dim"), [(3, 1, 0), (2, 0, 1), (2, 1, 1)])
def test_load_of_a_shard_reads_its_blocks_and_at_most_two_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, index: int, dim: int
) -> None:
    full = np.random.default_rng(0).integers(0, 255, (7, 3 * BLOCK_BYTES + 5), "u1")
    save({"w": plain(full)}, tmp_path / "step")
    state = {"w": shard(np.zeros_like(full), num_shards, index, dim=dim)}
    readers: list[DataReader] = []
    monkeypatch.setattr(DataReader, "close", lambda reader: readers.append(reader))  # noqa: PLW0108

    load_state(
        state, tmp_path / "step", peers=Alone(), arrays=NumpyArrays(), strict=True, verify=True
    )

    entry = read_metadata(tmp_path / "step").leaves[0]
    assert isinstance(entry, TensorEntry)
    header = read_metadata(tmp_path / "step").files[entry.pieces[0].file].header_bytes
    wanted = state["w"].values.nbytes
    num_runs = 1 if dim == 0 else full.shape[0]
    verified = readers[0].num_bytes_read - header - wanted
    assert wanted <= verified <= wanted + 2 * BLOCK_BYTES * num_runs
    assert np.array_equal(state["w"].values, full[state["w"].box.slices()])
    monkeypatch.undo()
    readers[0].close()


MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from hp_checkpoint.loading import load_state
from hp_checkpoint.ports import Alone
from hp_checkpoint.saving import save_state
from hp_checkpoint.testing import NumpyArrays, plain

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

ports = {"peers": Alone(), "arrays": NumpyArrays()}
values = np.ones((int(sys.argv[2]) << 17, 8), "u1")
state = {"w": plain(values), "t": plain(values.T)}
start = peak()
save_state(state, sys.argv[1], overwrite=True, **ports)
saved = peak()
values[:] = 0
load_state(state, sys.argv[1], strict=True, verify=True, **ports)
print(saved - start, peak() - saved)
"""


@pytest.mark.parametrize("mebibytes", [32, 256])
def test_memory_beyond_the_tensors_is_bounded_at_any_size(tmp_path: Path, mebibytes: int) -> None:
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "step"), str(mebibytes)]

    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert max(map(int, found)) <= 64
