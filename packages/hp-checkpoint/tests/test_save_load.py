"""Saving and loading over thread ranks, without a framework."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors

from hp_checkpoint.errors import (
    ExistsError,
    FolderError,
    LockedError,
    MatchError,
    NotFoundError,
    RankError,
    StateError,
)
from hp_checkpoint.inspection import read_metadata, verify
from hp_checkpoint.loading import PerRank, load_all, load_state
from hp_checkpoint.lock import PathLock
from hp_checkpoint.match import LoadReport
from hp_checkpoint.ports import Alone
from hp_checkpoint.saving import save_state
from hp_checkpoint.testing import BoxArray, NumpyArrays, plain, replica, shard
from hp_checkpoint.tree import OpenDict
from hp_comm.testing import run_threads

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(0)
FULL = {
    "long": RNG.standard_normal((7, 5)),
    "wide": RNG.standard_normal((3, 11)).astype("f4"),
    "scalar": np.array(3, "i8"),
    "empty": np.zeros((0, 4), "f4"),
    "flags": RNG.integers(0, 2, (2, 3, 5)).astype("?"),
    "complex": (RNG.standard_normal(6) + 1j).astype("c16"),
}


def save(state: Any, path: Path, peers: Any = None, *, overwrite: bool = True) -> None:
    save_state(state, path, peers=peers or Alone(), arrays=NumpyArrays(), overwrite=overwrite)


def load(state: Any, path: Path, peers: Any = None, *, strict: bool = True) -> LoadReport:
    arrays = NumpyArrays()
    return load_state(
        state, path, peers=peers or Alone(), arrays=arrays, strict=strict, verify=True
    )


def load_full(path: Path) -> Any:
    return load_all(path, arrays=NumpyArrays(), verify=True)


def cut(name: str, full: np.ndarray, world_size: int, rank: int, dim: int) -> BoxArray:
    if name == "wide":
        return shard(full, world_size, rank, dim=1 - dim)
    if full.ndim == 0:
        return replica(full)
    return shard(full, world_size, rank, dim=min(dim, full.ndim - 1))


def state_of(world_size: int, rank: int, dim: int, *, zero: bool = False) -> dict[str, Any]:
    arrays = {name: np.zeros_like(full) if zero else full for name, full in FULL.items()}
    return {
        "model": {name: cut(name, full, world_size, rank, dim) for name, full in arrays.items()},
        "list": [plain(arrays["long"].copy()), 5 * (not zero)],
        "copy": replica(arrays["wide"]),
        "step": 0 if zero else 17,
    }


def save_rank(comm: Any, path: Path, dim: int) -> None:
    save(state_of(len(comm.ranks), comm.index, dim), path, comm)


def load_rank(comm: Any, path: Path, dim: int) -> tuple[dict[str, Any], LoadReport]:
    state = state_of(len(comm.ranks), comm.index, dim, zero=True)
    return state, load(state, path, comm)


@pytest.mark.parametrize("load_size", [1, 2, 3, 4])
@pytest.mark.parametrize("save_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_load_on_any_number_of_ranks_gives_each_its_box(
    tmp_path: Path, save_size: int, load_size: int, dims: tuple[int, int]
) -> None:
    path = tmp_path / "step"
    run_threads(save_rank, save_size, path, dims[0])

    found = run_threads(load_rank, load_size, path, dims[1])

    for rank, (state, report) in enumerate(found):
        expected = state_of(load_size, rank, dims[1])
        assert report == LoadReport((), (), ())
        assert state["step"] == 17
        assert state["list"][1] == 5
        for name, array in state["model"].items():
            assert np.array_equal(array.values, expected["model"][name].values), name
        assert np.array_equal(state["copy"].values, FULL["wide"])
        assert np.array_equal(state["list"][0].values, FULL["long"])
    assert verify(path) == []


def test_load_full_gives_whole_arrays(tmp_path: Path) -> None:
    run_threads(save_rank, 3, tmp_path / "step", 0)

    found = load_full(tmp_path / "step")

    assert list(found) == ["model", "list", "copy", "step"]
    for name, full in FULL.items():
        assert found["model"][name].values.dtype == full.dtype
        assert np.array_equal(found["model"][name].values, full), name


def test_save_writes_files_that_safetensors_reads(tmp_path: Path) -> None:
    run_threads(save_rank, 2, tmp_path / "step", 0)

    names: dict[str, bytes] = {}
    for file in (tmp_path / "step").glob("*.safetensors"):
        names |= {name: one["data"] for name, one in safetensors.deserialize(file.read_bytes())}

    assert bytes(names["model/long[0:4,0:5]"]) == FULL["long"][:4].tobytes()
    assert bytes(names["model/scalar"]) == FULL["scalar"].tobytes()


def test_save_writes_replicas_once(tmp_path: Path) -> None:
    def work(comm: Any) -> None:
        save({"w": replica(FULL["long"]), "p": plain(FULL["long"])}, tmp_path / "s", comm)

    run_threads(work, 3)

    entries = read_metadata(tmp_path / "s").leaves
    assert [len(entry.pieces) for entry in entries] == [1, 1]


def test_save_of_values_that_differ_keeps_each_ranks(tmp_path: Path) -> None:
    path = tmp_path / "step"

    def work(comm: Any) -> None:
        own = plain(np.full(2 + comm.index, comm.index))
        save({"seed": comm.index, "rng": own, "same": 1}, path, comm)

    def restore(comm: Any) -> tuple[dict[str, Any], LoadReport]:
        own = plain(np.zeros(2 + comm.index, "i8"))
        state = {"seed": -1, "rng": own, "same": 0}
        return state, load(state, path, comm)

    run_threads(work, 2)
    found = run_threads(restore, 2)
    other, report = run_threads(restore, 1)[0]
    whole = load_full(path)

    assert [state["seed"] for state, _ in found] == [0, 1]
    assert [state["rng"].values.tolist() for state, _ in found] == [[0, 0], [1, 1, 1]]
    assert report.per_rank == ("seed", "rng")
    assert (other["seed"], other["same"]) == (-1, 1)
    assert whole["seed"] == PerRank({0: 0, 1: 1})


def test_save_of_arrays_off_the_host_or_not_contiguous(tmp_path: Path) -> None:
    values = RNG.standard_normal((300, 7))
    whole = plain(values)
    device = BoxArray(values, values.shape, whole.box, is_plain=True, is_on_host=False)
    save({"t": plain(values.T), "device": device}, tmp_path / "s")
    zeros = np.zeros_like(values)
    target = BoxArray(zeros, zeros.shape, whole.box, is_plain=True, is_on_host=False)
    transposed = np.zeros((300, 7)).T

    load({"t": plain(transposed), "device": target}, tmp_path / "s")

    assert np.array_equal(transposed, values.T)
    assert np.array_equal(zeros, values)


def test_save_replaces_a_checkpoint_and_keeps_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save({"v": 1, "w": plain(np.zeros(3))}, path)
    (path / "notes.txt").write_text("mine")
    (path / "data-0123456789abcdef-00000.safetensors").write_text("mine too")
    old = next(iter(read_metadata(path).files))

    save({"v": 2, "w": plain(np.ones(3))}, path)

    new = next(iter(read_metadata(path).files))
    assert load_full(path)["v"] == 2
    assert sorted(os.listdir(path)) == sorted(
        [new, "manifest.json", "notes.txt", "data-0123456789abcdef-00000.safetensors"]
    )
    assert old != new
    assert os.listdir(tmp_path) == ["step"]


def test_save_into_an_existing_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    save({"v": 2}, tmp_path)

    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "notes.txt"]


def test_save_without_overwrite_raises_before_a_byte_is_written(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save({"v": 1}, path)
    before = {file.name: file.stat().st_mtime_ns for file in [path, *path.iterdir()]}

    def work(comm: Any) -> None:
        with pytest.raises(ExistsError, match="overwrite=False"):
            save({"v": 2}, path, comm, overwrite=False)

    run_threads(work, 2)

    assert {file.name: file.stat().st_mtime_ns for file in [path, *path.iterdir()]} == before


def test_save_leaves_a_foreign_manifest_alone(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')

    with pytest.raises(ExistsError, match="isn't a manifest of hp-checkpoint"):
        save({"v": 2}, tmp_path)

    assert (tmp_path / "manifest.json").read_text() == '{"name": "a web app"}'


def test_save_to_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").write_text("mine")

    with pytest.raises(ExistsError, match="is a file"):
        save({"v": 2}, tmp_path / "step")


def test_save_of_something_unknown_writes_nothing(tmp_path: Path) -> None:
    def work(comm: Any) -> None:
        bad: object = object() if comm.index == 1 else 3
        with pytest.raises(StateError, match=r"rank 1: a/b: a value of type builtins\.object"):
            save({"a": {"b": bad}}, tmp_path / "step", comm)

    run_threads(work, 2)

    assert list(tmp_path.iterdir()) == []


def test_save_while_another_job_saves_raises_and_leaves_it_alone(tmp_path: Path) -> None:
    lock = PathLock(tmp_path / "step")

    def work(comm: Any) -> None:
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            save({"v": 1}, tmp_path / "step", comm)

    run_threads(work, 2)

    assert [file.name for file in tmp_path.iterdir()] == [".step.hp-lock"]
    lock.release()


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_save_to_different_folders_is_refused_before_data(tmp_path: Path, exists: bool) -> None:
    folders = [tmp_path / "host0" / "step", tmp_path / "host1" / "step"]
    for folder in folders:
        (folder if exists else folder.parent).mkdir(parents=True)

    def work(comm: Any) -> None:
        with pytest.raises(FolderError, match=r"rank 1: .*this rank doesn't see the folder"):
            save({"w": shard(FULL["long"], 2, comm.index)}, folders[comm.index], comm)

    run_threads(work, 2)

    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_save_that_fails_on_one_rank_raises_on_all_and_cleans_up(
    tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step"
    if exists:
        save({"w": plain(FULL["long"])}, path)
    before = sorted(tmp_path.rglob("*"))

    class Full(NumpyArrays):
        def view(self, tensor: object) -> np.ndarray | None:
            raise OSError(28, "No space left on device")

    def work(comm: Any) -> None:
        arrays = Full() if comm.index == 1 else NumpyArrays()
        state: dict[object, object] = {"w": shard(FULL["long"], 2, comm.index)}
        with pytest.raises(RankError, match=r"rank 1: OSError: .*No space left"):
            save_state(state, path, peers=comm, arrays=arrays, overwrite=True)

    run_threads(work, 2)

    assert sorted(tmp_path.rglob("*")) == before


def test_load_lists_every_misfit_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save({"a": plain(np.ones(3)), "b": plain(np.ones(3)), "c": 1, "d": 4}, path)
    state = {
        "a": plain(np.zeros(4)),
        "b": plain(np.zeros(3, "f4")),
        "c": plain(np.zeros(1)),
        "d": 0,
        "e": plain(np.zeros(1)),
    }

    with pytest.raises(MatchError) as caught:
        load(state, path)

    assert str(caught.value).splitlines()[1:] == [
        "  a: wanted a float64 tensor of shape (4,), found a float64 tensor of shape (3,)",
        "  b: wanted a float32 tensor of shape (3,), found a float64 tensor of shape (3,)",
        "  c: wanted a tensor, found a plain value",
        "  e: wanted, found nothing",
        "Pass strict=False to keep what is missing.",
    ]
    assert state["d"] == 0
    assert not state["a"].values.any()  # type: ignore[attr-defined]  # a BoxArray


def test_load_misfit_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save({"a": plain(np.ones(3))}, path)

    def work(comm: Any) -> float:
        target = plain(np.zeros(3 + comm.index))
        with pytest.raises(MatchError, match=r"rank 1: .*\n  a: wanted"):
            load({"a": target}, path, comm)
        return float(target.values.sum())

    assert run_threads(work, 2) == [0, 0]


def test_load_not_strict_reports_missing_and_unexpected(tmp_path: Path) -> None:
    save({"a": 1, "b": 2}, tmp_path / "s")
    state = {"a": 0, "c": 3}

    report = load(state, tmp_path / "s", strict=False)

    assert state == {"a": 1, "c": 3}
    assert report == LoadReport(missing=("c",), unexpected=("b",), per_rank=())


def test_load_fills_an_empty_dict_with_values(tmp_path: Path) -> None:
    save({"a": {"b": 1, "c": {"d": (2,)}}}, tmp_path / "s")
    state: dict[str, Any] = {"a": {}}

    load(state, tmp_path / "s")

    assert state == {"a": {"b": 1, "c": {"d": (2,)}}}


def test_load_completes_an_open_dict_by_the_layout_given(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def work(comm: Any) -> None:
        moments = {"m": shard(FULL["long"], 3, comm.index), "step": plain(np.array(4.0)), "k": 1}
        save({"state": {"w": moments, "unused": {}}}, path, comm)

    def restore(comm: Any) -> Any:
        like = shard(np.zeros((7, 5)), 2, comm.index)
        opened = OpenDict({"k": 0}, like=like)
        state = {"state": {"w": opened, "unused": OpenDict(like=like)}}
        report = load(state, path, comm)
        return opened, report

    run_threads(work, 3)
    found = run_threads(restore, 2)

    for rank, (opened, report) in enumerate(found):
        assert report == LoadReport((), (), ())
        assert opened["k"] == 1
        assert opened["step"].values == 4
        assert np.array_equal(opened["m"].values, shard(FULL["long"], 2, rank).values)


def test_load_of_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint at"):
        load({"a": 1}, tmp_path / "step")


def test_load_reads_the_old_checkpoint_while_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save({"w": plain(np.ones(3)), "v": 1}, path)
    replaced: list[int] = []

    class Late(NumpyArrays):
        def view(self, tensor: object) -> np.ndarray | None:
            if not replaced:  # the files are open by now
                replaced.append(1)
                save({"w": plain(np.full(3, 2.0)), "v": 2}, path)
            return super().view(tensor)

    state: dict[Any, Any] = {"w": plain(np.zeros(3)), "v": 0}
    load_state(state, path, peers=Alone(), arrays=Late(), strict=True, verify=True)

    assert state["v"] == 1
    assert state["w"].values.tolist() == [1, 1, 1]
    assert load_full(path)["v"] == 2
