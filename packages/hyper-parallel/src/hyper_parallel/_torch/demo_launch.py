"""Starts the ranks of a phase by torchrun's own library call, and ends them all again.

However a phase ends, no rank outlives it: torchrun's agent ends the others when one fails or a
signal arrives, and what is left after that is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hyper_parallel._torch.demo_train import train_rank
from hyper_parallel.errors import DemoInterrupted, RankError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hyper_parallel.demo.job import PhaseJob, RankResult

SHUTDOWN_S = 2
MAX_REASON_LENGTH = 300
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Let the C library keep freed memory: giving it back costs a page fault per 4 KiB and step."""


def run_phase(job: PhaseJob) -> list[RankResult]:
    """Start the ranks of one phase and return their results.

    Args:
        job: The phase.

    Returns:
        One result per rank, by rank.

    Raises:
        RankError: A rank ended early; the others have been ended too.
        DemoInterrupted: A signal arrived; all ranks have been ended.
    """
    log = job.files.rank_logs / "launcher.log"
    try:
        with _rank_environment(job), _signals_restored(), _errors_in(log):
            results = elastic_launch(_launch_config(job), train_rank)(job)
    except ChildFailedError as error:
        raise RankError(_describe(job, error)) from error
    except SignalException as error:
        raise DemoInterrupted(error.sigval) from error
    finally:
        _end_children()
    return [results[rank] for rank in range(job.ranks)]


def _launch_config(job: PhaseJob) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id=_run_id(job),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.files.rank_logs), redirects=Std.ALL),
    )


def _describe(job: PhaseJob, error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT:
        cause = f"was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        rank, reason = _first_error(job) or (rank, f"exit code {failure.exitcode}")
        cause = f"failed: {shorten(reason, MAX_REASON_LENGTH)}"
    return (
        f"rank {rank} of phase {job.number} {cause}; the other ranks were ended. "
        f"Look at {job.files.rank_logs} for what the ranks said."
    )


def _first_error(job: PhaseJob) -> tuple[int, str] | None:
    """Return which rank wrote the first error report, and what it says.

    One rank's error soon makes others fail, and the agent may notice one of those first.
    """
    reports = list(job.files.rank_logs.glob(f"{_run_id(job)}_*/attempt_0/*/error.json"))
    if not reports:
        return None
    first = min(reports, key=lambda path: path.stat().st_mtime_ns)
    message = json.loads(first.read_text(encoding="utf-8"))["message"]
    return int(first.parent.name), str(message.get("message", message))


def _run_id(job: PhaseJob) -> str:
    return f"phase-{job.number}"


@contextmanager
def _rank_environment(job: PhaseJob) -> Iterator[None]:
    """Set what ranks inherit; what the user has set himself stays, but for the transport."""
    wanted = {"OMP_NUM_THREADS": str(job.threads), "PYTHONUNBUFFERED": "1", **MALLOC_SETTINGS}
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    wanted = {name: value for name, value in wanted.items() if name not in os.environ}
    if job.options.transport != "auto":
        wanted["HP_TRANSPORT"] = job.options.transport
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Undo the handlers that torchrun's agent installs and leaves behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _errors_in(log: Path) -> Iterator[None]:
    """Send this process's stderr to a file, below Python, so that ranks inherit it.

    Neither the agent's own tracebacks nor those of ranks that are ended while they still load
    belong on the terminal: a `RankError` says it in a line. A rank that has begun writes to its
    own files.
    """
    log.parent.mkdir(exist_ok=True)
    sys.stderr.flush()
    terminal = os.dup(2)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def _end_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
