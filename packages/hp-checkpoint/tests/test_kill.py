"""SIGKILL at every moment of a save: the old checkpoint or the new one is there, never half."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_checkpoint import verify
from hp_checkpoint.errors import NotFoundError
from hp_checkpoint.loading import load_all
from hp_checkpoint.ports import Alone
from hp_checkpoint.saving import save_state
from hp_checkpoint.testing import KillSwitch, NumpyArrays, plain

NUM_MOMENTS = 60  # more than a save has; those beyond its end finish it
SAMPLE = sorted(random.Random(3).sample(range(1, NUM_MOMENTS // 2), 6))
EVERY = [pytest.param(m, marks=pytest.mark.stress) for m in range(1, NUM_MOMENTS + 1)]
SOME_DELAYS = [0.02, 0.1]
MANY_DELAYS = [pytest.param(0.005 * i, marks=pytest.mark.stress) for i in range(1, 41)]


def state_of(version: int, num_elements: int = 500_000) -> dict[Any, Any]:
    values = np.random.default_rng(version).standard_normal(num_elements)
    return {"w": plain(values), "b": plain(values[:7].copy()), "version": version}


def save(version: int, path: Path) -> None:
    save_state(state_of(version), path, peers=Alone(), arrays=NumpyArrays(), overwrite=True)


def loaded_version(path: Path) -> int:
    """Return which version is there, after comparing every bit; 0 if there is none."""
    try:
        found: Any = load_all(path, arrays=NumpyArrays(), verify=True)
    except NotFoundError:
        return 0
    expected = state_of(found["version"])
    for name in ("w", "b"):
        assert found[name].values.tobytes() == expected[name].values.tobytes()
    assert {damage.kind for damage in verify(path)} <= {"unlisted"}
    return int(found["version"])


SAVE_ONCE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_kill import KillSwitch, save
switch = KillSwitch(int(sys.argv[3]))
switch.arm()
save(2, Path(sys.argv[2]))
"""
SAVE_ALWAYS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_kill import save
version = int(sys.argv[3])
print("begin", flush=True)
while True:
    save(version, Path(sys.argv[2]))
    print(version, flush=True)
    version += 1
"""


def command(script: str, path: Path, number: int) -> list[str]:
    return [sys.executable, "-c", script, str(Path(__file__).parent), str(path), str(number)]


def assert_next_save_works_and_cleans_up(path: Path) -> None:
    save(3, path)
    assert loaded_version(path) == 3
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    names = sorted(entry.name for entry in path.iterdir())
    assert len(names) == 2
    assert names[1] == "manifest.json"


@pytest.mark.parametrize("moment", [*SAMPLE, *EVERY])
def test_kill_during_a_save_to_a_new_path(tmp_path: Path, moment: int) -> None:
    path = tmp_path / "step"

    code = subprocess.run(command(SAVE_ONCE, path, moment), check=False).returncode

    assert code in (0, -signal.SIGKILL)
    assert loaded_version(path) in ({2} if code == 0 else {0, 2})
    assert_next_save_works_and_cleans_up(path)


@pytest.mark.parametrize("moment", [*SAMPLE, *EVERY])
def test_kill_during_a_save_over_a_checkpoint(tmp_path: Path, moment: int) -> None:
    path = tmp_path / "step"
    save(1, path)

    code = subprocess.run(command(SAVE_ONCE, path, moment), check=False).returncode

    assert code in (0, -signal.SIGKILL)
    assert loaded_version(path) in ({2} if code == 0 else {1, 2})
    assert_next_save_works_and_cleans_up(path)


@pytest.mark.parametrize("delay_s", [*SOME_DELAYS, *MANY_DELAYS])
def test_kill_at_any_time_keeps_the_newest_complete_checkpoint(
    tmp_path: Path, delay_s: float
) -> None:
    path = tmp_path / "step"
    save(1, path)
    with subprocess.Popen(
        command(SAVE_ALWAYS, path, 2), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begin\n"
        time.sleep(delay_s)
        process.kill()
        completed = [1, *(int(line) for line in process.stdout.read().split())]

    assert loaded_version(path) in (completed[-1], completed[-1] + 1)
    assert_next_save_works_and_cleans_up(path)


def test_kill_beside_another_path_is_cleaned_by_its_neighbours_save(tmp_path: Path) -> None:
    switch_at = 6  # the temporary folder is there and its data file is open
    subprocess.run(command(SAVE_ONCE, tmp_path / "old", switch_at), check=False)
    left = [entry.name for entry in tmp_path.iterdir()]

    save(3, tmp_path / "new")

    assert any(".old.hp-saving-" in name for name in left)
    assert "new" in os.listdir(tmp_path)
    assert not any("hp-saving" in name for name in os.listdir(tmp_path))


def recorded(path: Path) -> list[tuple[str, str]]:
    switch = KillSwitch(0)
    switch.arm()
    try:
        save(2, path)
    finally:
        switch.disarm()
    return switch.calls


@pytest.mark.parametrize("exists", [False, True], ids=["new", "existing"])
def test_save_makes_everything_durable_before_it_counts(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "step"
    if exists:
        save(1, path)

    calls = recorded(path)

    commit = next(i for i, (name, _) in enumerate(calls) if name in ("rename", "replace"))
    synced = [target for name, target in calls[:commit] if name == "fsync"]
    written = {target for name, target in calls[:commit] if name in ("write", "writev")}
    assert {t for t in written if not t.endswith("hp-lock")} <= set(synced)
    folder = str(path) if exists else calls[commit][1]
    assert synced[-1] == folder
    assert calls[commit + 1] == ("fsync", str(path) if exists else str(tmp_path))
    assert not [target for name, target in calls[:commit] if name in ("unlink", "rmdir")]


def test_kill_never_removes_what_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(1, path)
    mine = path / "data-00000000000000ff-00000.safetensors"
    mine.write_text("mine")
    folder = tmp_path / ".step.hp-saving-00000000000000ff"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    save(2, path)

    assert mine.read_text() == "mine"
    assert (folder / "notes.txt").read_text() == "mine"
