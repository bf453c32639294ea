"""Ranks as processes: results come home, failures too, and nothing stays."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hp_comm import CommError
from hp_comm.testing import RankError, run_ranks

ADD = 10


def add_rank(rank: int, world_size: int, number: int) -> tuple[int, int]:
    return rank + number + ADD, world_size


def read_environment(rank: int, world_size: int, names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def fail_on_rank(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"broken on purpose on {rank}")
    time.sleep(30)


def fail_after(rank: int, world_size: int, delays_s: list[float]) -> None:
    time.sleep(delays_s[rank])
    raise ValueError(f"rank {rank} is broken")


def leave_rank(rank: int, world_size: int, how: str) -> None:
    if rank == 0:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(7)
    time.sleep(30)


def start_sleeper(rank: int, world_size: int, path: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(f"{process.pid} {os.getpid()}")


def return_unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def exit_quietly(rank: int, world_size: int) -> None:
    sys.exit(3)


class Holder:
    @staticmethod
    def name_rank(rank: int, world_size: int) -> str:
        return f"rank {rank}"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> list[int]:
    end = time.monotonic() + 5
    left = pids
    while left and time.monotonic() < end:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_run_ranks_returns_results_by_rank(world_size: int) -> None:
    expected = [(rank + 5 + ADD, world_size) for rank in range(world_size)]
    assert run_ranks(add_rank, world_size, 5) == expected


def test_run_ranks_of_static_method_finds_it_by_qualname() -> None:
    assert run_ranks(Holder.name_rank, 2) == ["rank 0", "rank 1"]


def test_run_ranks_sets_what_torchrun_sets() -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    found = run_ranks(read_environment, 2, names)
    assert found == [["0", "0", "2", "2", "127.0.0.1"], ["1", "1", "2", "2", "127.0.0.1"]]


def test_run_ranks_passes_environment_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(add_rank, 1, 0)  # the fork server runs from here on
    monkeypatch.setenv("HP_TEST_OUTER", "outer")
    names = ["HP_TEST_OUTER", "HP_TEST_INNER"]
    assert run_ranks(read_environment, 1, names, env={"HP_TEST_INNER": "in"}) == [["outer", "in"]]
    monkeypatch.delenv("HP_TEST_OUTER")
    assert run_ranks(read_environment, 1, names) == [[None, None]]


@pytest.mark.parametrize("bad", [0, 1])
def test_run_ranks_with_failing_rank_raises_its_traceback_in_seconds(bad: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {bad} failed") as caught:
        run_ranks(fail_on_rank, 2, bad)
    assert time.monotonic() - start < 15
    assert f"ValueError: broken on purpose on {bad}" in str(caught.value)
    assert "in fail_on_rank" in str(caught.value)


def test_run_ranks_with_two_failures_names_the_earlier_one_first() -> None:
    with pytest.raises(RankError, match=r"^rank 1 failed") as caught:
        run_ranks(fail_after, 2, [1.0, 0.0])
    assert "rank 0 as well" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"), [("signal", "was ended by SIGSEGV"), ("exit", "ended by itself .*code 7")]
)
def test_run_ranks_with_dying_rank_says_how_it_died(how: str, text: str) -> None:
    with pytest.raises(RankError, match=f"rank 0 {text}"):
        run_ranks(leave_rank, 2, how)


def test_run_ranks_with_hanging_ranks_ends_at_the_time_out() -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] didn't end within 1.0 s"):
        run_ranks(fail_on_rank, 2, 2, timeout_s=1.0)


def test_run_ranks_with_unpicklable_result_says_so() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(return_unpicklable, 1)


def test_run_ranks_with_exiting_rank_raises_its_exit() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(exit_quietly, 2)


def test_run_ranks_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "pids"
    run_ranks(start_sleeper, 1, str(path))
    assert wait_until_gone([int(word) for word in path.read_text().split()]) == []


def test_run_ranks_of_killed_caller_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(
        textwrap.dedent("""
            import os, sys, time
            from pathlib import Path

            def stay(rank, world_size, folder):
                Path(folder, f"draft{rank}").write_text(str(os.getpid()))
                Path(folder, f"draft{rank}").rename(Path(folder, f"pid{rank}"))
                time.sleep(60)

            if __name__ == "__main__":
                from hp_comm.testing import run_ranks
                run_ranks(stay, 2, sys.argv[1])
        """)
    )
    command = [sys.executable, str(tmp_path / "ranks.py"), str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONWARNINGS": "error"}) as caller:
        paths = [tmp_path / "pid0", tmp_path / "pid1"]
        while not all(path.exists() for path in paths) and caller.poll() is None:
            time.sleep(0.01)
        caller.kill()
    assert wait_until_gone([int(path.read_text()) for path in paths]) == []


def test_run_ranks_of_lambda_is_refused() -> None:
    with pytest.raises(CommError, match=r"<lambda>.*top level of a file"):
        run_ranks(lambda rank, world_size: rank, 2)


def test_run_ranks_of_no_rank_is_refused() -> None:
    with pytest.raises(CommError, match="0 ranks"):
        run_ranks(exit_quietly, 0)
