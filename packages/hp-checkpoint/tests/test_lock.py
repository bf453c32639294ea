"""One saver per path, and a lock that ends with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from hp_checkpoint.errors import LockedError
from hp_checkpoint.lock import PathLock

if TYPE_CHECKING:
    from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from hp_checkpoint.lock import PathLock
lock = PathLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_lock_held_by_this_process_refuses_a_second(tmp_path: Path) -> None:
    lock = PathLock(tmp_path / "step")

    with pytest.raises(LockedError, match=f"process {os.getpid()} on "):
        PathLock(tmp_path / "step", patience_s=0.05)
    lock.release()


@pytest.mark.parametrize("exists", [True, False], ids=["inside", "beside"])
def test_lock_leaves_nothing_when_released(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "step"
    if exists:
        target.mkdir()

    PathLock(target).release()

    assert list(tmp_path.rglob("*")) == [target] * exists


def test_lock_waits_a_moment_for_a_busy_path(tmp_path: Path) -> None:
    first = PathLock(tmp_path / "step")
    threading.Timer(0.1, first.release).start()

    PathLock(tmp_path / "step", patience_s=10).release()


def test_lock_of_a_killed_owner_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "step")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"process {owner.pid} on "):
            PathLock(tmp_path / "step", patience_s=0)
        owner.send_signal(signal.SIGKILL)
        owner.wait()

    PathLock(tmp_path / "step", patience_s=0).release()

    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys, time
from pathlib import Path
from hp_checkpoint.lock import PathLock
lock = PathLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


def test_lock_of_a_killed_owner_is_free_though_its_forked_child_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORK, str(tmp_path / "step")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.wait()
        try:
            PathLock(tmp_path / "step", patience_s=5).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_lock_of_a_folder_that_came_meanwhile_is_taken_inside(tmp_path: Path) -> None:
    target = tmp_path / "step"
    first = PathLock(target)
    target.mkdir()
    first.release()

    second = PathLock(target)

    assert second.file.parent == target
    second.release()


def test_lock_is_never_held_by_two(tmp_path: Path) -> None:
    held: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            lock = PathLock(tmp_path / "step", patience_s=30)
            held.append(1)
            most.append(len(held))
            time.sleep(0.0005)
            held.pop()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert max(most) == 1
    assert len(most) == 80
