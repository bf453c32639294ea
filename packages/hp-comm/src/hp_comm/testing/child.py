"""What a rank started by `run_ranks` does: load the function, join the group, call, report."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import ModuleType

HOST = "127.0.0.1"


def run_child(
    rank: int,
    world_size: int,
    source: tuple[str, str],
    call: tuple[tuple[object, ...], dict[str, str]],
    channel: Connection,
) -> None:
    """Run one rank; sends ("port", n) from rank 0, then ("result", r) or ("failure", text).

    Args:
        rank: This process's rank.
        world_size: Number of ranks of the run.
        source: Path of the function's file, and its name there.
        call: The function's further arguments, and the whole environment.
        channel: To the process that started the ranks.
    """
    os.setsid()
    Thread(target=_die_with_caller, args=(channel,), daemon=True).start()
    args, environment = call
    _set_environment(rank, world_size, environment)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of imports and set-up: not what is tested
            function = _load(*source)
            _join_group(rank, world_size, channel)
        assert callable(function), f"{source[1]} isn't a function"
        message = pickle.dumps(("result", function(rank, world_size, *args)))
    except BaseException:  # every failure of the code under test goes home
        message = pickle.dumps(("failure", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send_bytes(message)
    _wait_for_the_others(channel)
    os._exit(0)


def _die_with_caller(channel: Connection) -> None:
    """Wait until the other end of the channel is gone, then kill this rank and all it started."""
    poll = select.poll()
    poll.register(channel.fileno(), 0)  # no event but the hang-up
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def _set_environment(rank: int, world_size: int, environment: dict[str, str]) -> None:
    """Take over the environment of the call: the fork server's is that of its first use."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.clear()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR=HOST)
    os.environ.update(environment)


def _wait_for_the_others(channel: Connection) -> None:
    """Stay until everybody is done: leaving would break sockets that others still use."""
    try:
        while channel.recv() != "end":
            pass
    except EOFError:
        return


def _load(path: str, qualname: str) -> object:
    """Return a function of a file, which need not be importable by name."""
    folder, name = os.path.split(path)
    sys.path.insert(0, folder)
    found: object = _load_module(path, name.removesuffix(".py"))
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _load_module(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} isn't a Python file"
    assert spec.loader is not None, f"{path} isn't a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _join_group(rank: int, world_size: int, channel: Connection) -> None:
    """Set up process groups where a framework is installed that has them.

    A folder of tests named `torch` isn't torch: such a spec has no origin.
    """
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        importlib.import_module("hp_comm._torch.join").join_group(rank, world_size, channel)
