"""The demo as a user runs it: a command with real ranks, ended in several ways."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # ranks import the framework, on shared cores

TINY = ["--layers", "1", "--width", "64", "--context", "16"]
ENDLESS = ["--steps", "1000000"]


def _command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "hyper_parallel", "demo", "--out", str(out), *TINY, *arguments]


def _start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a session of its own, and wait until its ranks have made steps."""
    process = subprocess.Popen(
        _command(out, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    events = out / "events.jsonl"
    give_up_s = time.monotonic() + 120
    while not (events.exists() and "stepped" in events.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up_s, "the ranks made no step"
        time.sleep(0.1)
    return process


def _session_members(session: int) -> dict[int, str]:
    """Return the command lines of all living processes of a session, by process id."""
    folders = list(Path("/proc").glob("[0-9]*"))
    members = {int(folder.name): _command_line(folder, session) for folder in folders}
    return {pid: line for pid, line in members.items() if line}


def _command_line(folder: Path, session: int) -> str:
    """Return a process's command line; empty if it has ended or belongs to another session."""
    try:
        if os.getsid(int(folder.name)) == session:
            return (folder / "cmdline").read_text().replace("\0", " ")
    except (ProcessLookupError, FileNotFoundError):
        pass  # ended while we looked
    return ""


def _left_behind(session: int) -> dict[int, str]:
    """Return what is alive of a session 2 s after its command ended, or as soon as nothing is."""
    give_up_s = time.monotonic() + 2
    while (members := _session_members(session)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    return members


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _end(process: subprocess.Popen[str]) -> tuple[list[str], float]:
    """Wait for the command and return its lines on stderr and how long it took.

    Fails if a process outlives it.
    """
    start_s = time.monotonic()
    try:
        _, errors = process.communicate(timeout=30)
        waited_s = time.monotonic() - start_s
        assert _left_behind(process.pid) == {}
    finally:
        for member in _session_members(process.pid):
            os.kill(member, signal.SIGKILL)
    return errors.splitlines(), waited_s


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo")
    before = _shared_memory()

    ended = subprocess.run(
        _command(out, "--steps", "12", "--ranks", "2", "--resume-ranks", "1"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert _shared_memory() <= before
    return out, ended.stdout


def test_finished_demo_reports_both_phases(finished: tuple[Path, str]) -> None:
    report = json.loads((finished[0] / "report.json").read_text())

    first, second = report["phases"]
    assert (first["ranks"], first["first_step"], first["last_step"]) == (2, 0, 6)
    assert (second["ranks"], second["first_step"], second["last_step"]) == (1, 6, 12)
    assert len(first["losses"]) == len(second["losses"]) == 6
    assert report["val_loss"] == second["val_loss"] < first["losses"][0]
    assert report["train_s"] == pytest.approx(first["train_s"] + second["train_s"])
    assert report["versions"]["torch"]


def test_finished_demo_resumed_where_it_was(finished: tuple[Path, str]) -> None:
    first, second = json.loads((finished[0] / "report.json").read_text())["phases"]

    assert second["val_loss_after_resume"] == pytest.approx(first["val_loss"], abs=1e-4)


def test_finished_demo_made_the_expected_collectives(finished: tuple[Path, str]) -> None:
    first = json.loads((finished[0] / "report.json").read_text())["phases"][0]

    for kind, counts in first["collectives"].items():
        assert counts["counted"] == counts["expected"] > 0, kind
    # Each rank receives the other's half of what is gathered and of what is reduced, at least.
    assert min(first["wire_bytes_by_rank"]) > 6 * 3 * 4 * 60_000 / 2
    assert all(size > 10_000_000 for size in first["peak_pss_bytes_by_rank"])


def test_finished_demo_wrote_picture_checkpoint_and_sample(finished: tuple[Path, str]) -> None:
    out, printed = finished

    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "checkpoint").is_dir()
    assert len((out / "sample.txt").read_bytes()) > 100
    assert "phase 2: 1 rank, from the checkpoint at step 6 to step 12" in printed
    assert "nats per byte after" in printed


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_signal_ends_demo_within_5_s_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    before = _shared_memory()
    process = _start(tmp_path, *ENDLESS)
    assert len(_session_members(process.pid)) >= 3

    process.send_signal(number)
    errors, waited_s = _end(process)

    assert process.returncode == exit_code
    assert waited_s < 5
    assert len(errors) == 1
    assert f"ended by {number.name}" in errors[0]
    assert "nothing was saved, the first checkpoint comes after step 500000" in errors[0]
    assert _shared_memory() <= before


def test_signal_to_all_in_second_phase_says_what_was_saved(tmp_path: Path) -> None:
    # As a terminal does it: the signal reaches the ranks too. The second phase is long because
    # the first checkpoint comes at half of all steps; so it is caught at its start.
    process = _start(tmp_path, "--steps", "200", "--ranks", "1", "--resume-ranks", "2")
    events = tmp_path / "events.jsonl"
    while '"phase": 2' not in events.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)

    os.killpg(process.pid, signal.SIGINT)
    errors, waited_s = _end(process)

    assert process.returncode == 130
    assert waited_s < 5
    assert len(errors) == 1
    assert "checkpoint holds the state after step 100" in errors[0]


def test_killed_rank_ends_demo_with_one_line(tmp_path: Path) -> None:
    before = _shared_memory()
    process = _start(tmp_path, *ENDLESS)
    members = _session_members(process.pid)
    ranks = sorted(pid for pid, line in members.items() if "multiprocessing.spawn" in line)
    assert len(ranks) == 2

    os.kill(ranks[1], signal.SIGKILL)
    errors, waited_s = _end(process)

    assert process.returncode == 1
    assert waited_s < 10
    assert len(errors) == 1
    assert "rank 1 of phase 1 was ended by SIGKILL; the other ranks were ended" in errors[0]
    assert "nothing was saved" in errors[0]
    assert _shared_memory() <= before


def test_unwritable_out_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    ended = subprocess.run(
        _command(tmp_path / "file" / "out"), capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "can't be written (Not a directory)" in ended.stderr
