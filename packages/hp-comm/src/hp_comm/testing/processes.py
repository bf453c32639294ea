"""Run a function on several real local processes and bring results and tracebacks home.

The ranks are forked from a server that has imported torch once. A rank that fails ends the run
within seconds, with its traceback; ranks that hang are killed at the time-out; no process is left.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from hp_comm.testing.child import run_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import ForkServerContext, ForkServerProcess

GRACE_S = 3.0
"""What the other ranks get to say why, once one has failed."""


class RankError(AssertionError):
    """A rank raised, died or hung; holds its traceback."""


@dataclass
class _Rank:
    number: int
    process: ForkServerProcess
    channel: Connection
    answered: bool = False
    result: object = None
    failure: str = ""


@dataclass
class _Run:
    ranks: list[_Rank] = field(default_factory=list)
    deadline: float = 0.0

    @property
    def waiting(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.answered]


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on real processes and return the results by rank.

    Each rank is a process of its own with torch.distributed initialised over gloo (where torch is
    installed), one thread, and the environment variables that torchrun sets.

    Args:
        function: A function at the top level of a file; the ranks load that file by its path.
        world_size: Number of processes, at least 1.
        *args: Passed on; plain values.
        timeout_s: For the whole run, in seconds.
        env: More environment variables for the ranks.

    Raises:
        RankError: A rank raised (the message is its traceback), died, or didn't end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hp_comm.testing.preload"])
    run = _Run(deadline=time.monotonic() + timeout_s)
    source = (inspect.getfile(function), function.__qualname__)
    try:
        for number in range(world_size):
            run.ranks.append(_start(context, number, world_size, source, (args, dict(env or {}))))
        _collect(run)
    finally:
        for rank in run.ranks:
            _end(rank)
    _raise_first(run, timeout_s)
    return [rank.result for rank in run.ranks]


def _start(
    context: ForkServerContext,
    number: int,
    world_size: int,
    source: tuple[str, str],
    call: tuple[tuple[object, ...], dict[str, str]],
) -> _Rank:
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_child, args=(number, world_size, source, call, theirs), daemon=True
    )
    process.start()
    theirs.close()
    return _Rank(number, process, ours)


def _collect(run: _Run) -> None:
    while run.waiting:
        left = run.deadline - time.monotonic()
        ready = wait([rank.channel for rank in run.waiting], timeout=max(0.0, left))
        if not ready:
            return
        for rank in [rank for rank in run.waiting if rank.channel in ready]:
            _receive(run, rank)


def _receive(run: _Run, rank: _Rank) -> None:
    try:
        kind, value = rank.channel.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join(GRACE_S)
        code = rank.process.exitcode
        kind, value = "failure", f"rank {rank.number} died with exit code {code}"
    if kind == "port":
        for other in run.ranks:
            with contextlib.suppress(OSError):
                other.channel.send(value)
        return
    rank.answered = True
    if kind == "failure":
        rank.failure = value
        run.deadline = min(run.deadline, time.monotonic() + GRACE_S)
    else:
        rank.result = value


def _end(rank: _Rank) -> None:
    with contextlib.suppress(OSError):
        rank.channel.send("end")
    if rank.answered and not rank.failure:
        rank.process.join(GRACE_S)
    pid = rank.process.pid
    if rank.process.exitcode is None and pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        rank.process.kill()
        rank.process.join(GRACE_S)
    rank.channel.close()


def _raise_first(run: _Run, timeout_s: float) -> None:
    silent = [rank.number for rank in run.waiting]
    failed = [rank for rank in run.ranks if rank.failure]
    if failed:
        rest = f"\n(ranks {silent} then waited)" if silent else ""
        others = "".join(f"\n--- rank {r.number} as well:\n{r.failure}" for r in failed[1:])
        raise RankError(f"rank {failed[0].number} failed:\n{failed[0].failure}{rest}{others}")
    if silent:
        raise RankError(f"ranks {silent} didn't end within {timeout_s} s")
