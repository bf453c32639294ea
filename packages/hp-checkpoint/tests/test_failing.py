"""Failures around the moment at which a save begins to count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_checkpoint import commit, verify
from hp_checkpoint.errors import RankError
from hp_checkpoint.loading import load_all
from hp_checkpoint.ports import Alone, Peers
from hp_checkpoint.saving import save_state
from hp_checkpoint.testing import NumpyArrays, shard
from hp_comm.testing import run_threads

FULL = np.arange(10.0)
NUM_PHASES = 5  # offer, begin, meet, write, commit


def save(version: int, path: Path, peers: Any = None) -> None:
    peers = peers or Alone()
    array = shard(FULL * version, len(peers.ranks), peers.index)
    state: dict[object, object] = {"w": array, "version": version}
    save_state(state, path, peers=peers, arrays=NumpyArrays(), overwrite=True)


def loaded_version(path: Path) -> int:
    found: Any = load_all(path, arrays=NumpyArrays(), verify=True)
    assert np.array_equal(found["w"].values, FULL * found["version"])
    assert verify(path) == []
    return int(found["version"])


class Losing:
    """Ranks that are lost in the last exchange, after all were there."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._num_calls = 0
        self.ranks = peers.ranks
        self.index = peers.index

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        self._num_calls += 1
        found = self._peers.all_gather_bytes(value)
        if self._num_calls == NUM_PHASES:
            raise TimeoutError("rank 0 did not arrive")
        return found


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("loser", [0, 1])
def test_save_that_loses_a_rank_after_it_counts_stays_whole(
    tmp_path: Path, exists: bool, loser: int
) -> None:
    path = tmp_path / "step"
    if exists:
        save(1, path)

    def work(comm: Peers) -> None:
        if comm.index != loser:
            save(2, path, comm)
            return
        with pytest.raises(TimeoutError, match="did not arrive"):
            save(2, path, Losing(comm))

    run_threads(work, 2)

    assert loaded_version(path) == 2
    save(3, path)
    assert loaded_version(path) == 3
    assert os.listdir(tmp_path) == ["step"]


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupt_around_the_decisive_call_leaves_one_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, after: bool
) -> None:
    path = tmp_path / "step"
    if exists:
        save(1, path)
    name = "replace" if exists else "rename"
    real = getattr(os, name)

    def interrupted(*args: str) -> None:
        if after:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(2, path)

    if after:
        assert loaded_version_despite_leftovers(path) == 2
    elif exists:
        assert loaded_version(path) == 1
    else:
        assert os.listdir(tmp_path) == []
    save(3, path)
    assert loaded_version(path) == 3
    assert os.listdir(tmp_path) == ["step"]


def loaded_version_despite_leftovers(path: Path) -> int:
    found: Any = load_all(path, arrays=NumpyArrays(), verify=True)
    assert {damage.kind for damage in verify(path)} <= {"unlisted"}
    return int(found["version"])


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_disk_that_fails_after_it_counts_is_told_to_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    path = tmp_path / "step"
    if exists:
        save(1, path)
    real, decided = commit.sync_folder, []
    for name in ("rename", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, call=call: decided.append(call(*a)))

    def failing(folder: Path) -> None:
        if decided:
            raise OSError(5, "Input/output error")
        real(folder)

    monkeypatch.setattr(commit, "sync_folder", failing)

    def work(comm: Peers) -> None:
        with pytest.raises(RankError, match=r"is complete, but the disk failed .*Input/output"):
            save(2, path, comm)

    run_threads(work, 2)

    assert loaded_version_despite_leftovers(path) == 2


def test_disk_that_fails_before_it_counts_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step"
    save(1, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def work(comm: Peers) -> None:
        with pytest.raises(RankError, match=r"could not commit\. rank 0: OSError: .*No space"):
            save(2, path, comm)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        run_threads(work, 2)

    assert loaded_version(path) == 1
    assert len(os.listdir(path)) == 2


JOB = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from hp_checkpoint import LockedError
from test_failing import save
refused = 0
for version in range(int(sys.argv[3]), int(sys.argv[3]) + 25):
    try:
        save(version, Path(sys.argv[2]))
    except LockedError:
        refused += 1
print(refused)
"""


def test_two_jobs_that_save_to_one_path_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "step"
    command = [sys.executable, "-c", JOB, str(Path(__file__).parent), str(path)]

    jobs = [
        subprocess.Popen([*command, first], stdout=subprocess.PIPE, text=True)
        for first in ("100", "200")
    ]
    found = [job.communicate()[0] for job in jobs]

    assert [job.returncode for job in jobs] == [0, 0]
    assert all(int(refused) < 25 for refused in found)
    assert loaded_version(path) in {*range(100, 125), *range(200, 225)}
    assert os.listdir(tmp_path) == ["step"]


def test_folder_that_may_not_be_written_is_one_error_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    def work(comm: Peers) -> None:
        with pytest.raises(RankError, match=r"rank 0: PermissionError: .*Permission denied"):
            save(2, tmp_path / "step", comm)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refused)
        run_threads(work, 2)

    assert os.listdir(tmp_path) == []
