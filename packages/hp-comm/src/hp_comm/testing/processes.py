"""Run a function on several real local processes and bring results and tracebacks home.

The ranks are forked from a server that has imported torch once. A rank that fails ends the run
within seconds, with its traceback; ranks that hang are killed at the time-out; no process is left:
every rank leads a process group of its own, which is killed, also when the caller is gone.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from hp_comm.errors import CommError
from hp_comm.testing.child import run_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import ForkServerContext, ForkServerProcess

GRACE_S = 2.0
"""What the other ranks get to say why, once one has failed."""

OWN_VARIABLES = ("OMP_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                 "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")  # fmt: skip
"""Set for each rank, whatever the caller's environment says; `env` can change them."""


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
    deadline: float
    grace_s: float
    ranks: list[_Rank] = field(default_factory=list)
    failed: list[_Rank] = field(default_factory=list)  # in the order in which they failed

    @property
    def waiting(self) -> list[_Rank]:
        return [rank for rank in self.ranks if not rank.answered]


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout_s: float = 60.0,
    grace_s: float = GRACE_S,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on real processes and return the results by rank.

    Each rank is a process of its own with torch.distributed initialised over gloo (where torch is
    installed), one thread, the caller's environment and the variables that torchrun sets.

    Args:
        function: A function at the top level of a file; the ranks load that file by its path.
        world_size: Number of processes, at least 1.
        *args: Passed on; plain values.
        timeout_s: For the whole run, in seconds.
        grace_s: What the other ranks get to end by themselves, once one has failed, in seconds.
        env: More environment variables for the ranks.

    Raises:
        CommError: `world_size` is below 1, or the function isn't at the top level of a file.
        RankError: A rank raised (the message is its traceback), died, or didn't end in time.

    Example:
        >>> import calendar  # any function of a file: here, leap years in [rank, world_size)
        >>> run_ranks(calendar.leapdays, 2)
        [1, 0]
    """
    if world_size < 1 or "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise CommError(
            f"run_ranks was asked for {world_size} ranks of {function.__qualname__!r}. Pass at "
            f"least 1 rank and a function at the top level of a file."
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hp_comm.testing.preload"])
    run = _Run(time.monotonic() + timeout_s, grace_s)
    source = (inspect.getfile(function), function.__qualname__)
    environment = {k: v for k, v in os.environ.items() if k not in OWN_VARIABLES} | dict(env or {})
    try:
        for number in range(world_size):
            run.ranks.append(_start(context, number, world_size, source, (args, environment)))
        _collect(run)
    finally:
        _end(run.ranks)
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
    process = context.Process(target=run_child, args=(number, world_size, source, call, theirs))
    process.start()
    theirs.close()
    return _Rank(number, process, ours)


def _collect(run: _Run) -> None:
    """Hear every rank until all have answered, the time is up, or one failed and grace is over."""
    while run.waiting:
        left = run.deadline - time.monotonic()
        ready = wait([rank.channel for rank in run.waiting], timeout=max(0.0, left))
        if not ready:
            return
        for rank in [rank for rank in run.waiting if rank.channel in ready]:
            _receive(run, rank)


def _receive(run: _Run, rank: _Rank) -> None:
    try:
        kind, value = pickle.loads(rank.channel.recv_bytes())
    except (EOFError, ConnectionResetError):
        kind, value = "failure", f"rank {rank.number} {_how_it_ended(rank)}"
    if kind == "port":
        for other in run.ranks:
            with contextlib.suppress(OSError):
                other.channel.send(value)
        return
    rank.answered = True
    if kind == "failure":
        rank.failure = value
        run.failed.append(rank)
        run.deadline = min(run.deadline, time.monotonic() + run.grace_s)
    else:
        rank.result = value


def _how_it_ended(rank: _Rank) -> str:
    rank.process.join(GRACE_S)
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended by itself with exit code {code}"


def _end(ranks: list[_Rank]) -> None:
    """Kill every rank with all it started; those that answered have nothing left to do."""
    for rank in ranks:
        pid = rank.process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if rank.process.exitcode is None:
                rank.process.kill()
    for rank in ranks:
        rank.process.join(GRACE_S)
        rank.channel.close()


def _raise_first(run: _Run, timeout_s: float) -> None:
    silent = [rank.number for rank in run.waiting]
    if run.failed:
        first, *others = run.failed
        text = f"rank {first.number} failed:\n{first.failure}"
        if silent:
            text += f"\n(ranks {silent} hadn't ended by then)"
        raise RankError(
            text + "".join(f"\n--- rank {r.number} as well:\n{r.failure}" for r in others)
        )
    if silent:
        raise RankError(f"ranks {silent} didn't end within {timeout_s} s")
