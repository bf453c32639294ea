"""What a rank started by `run_ranks` does: load the function, join the group, call, report."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
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
    """Run one rank; sends ("port", n) from rank 0, then ("result", r) or ("failure", text)."""
    os.setsid()
    args, env = call
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR=HOST, OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(env)
    try:
        function: object = _load(source[0])
        for name in source[1].split("."):
            function = getattr(function, name)
        _join_group(rank, world_size, channel)
        assert callable(function), f"{source[1]} isn't a function"
        message = ("result", function(rank, world_size, *args))
    except BaseException:  # every failure of the code under test goes home
        message = ("failure", traceback.format_exc())
    channel.send(message)
    _wait_for_the_others(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait_for_the_others(channel: Connection) -> None:
    """Stay until everybody is done: leaving would break sockets that others still use."""
    try:
        while channel.recv() != "end":
            pass
    except EOFError:
        return


def _load(path: str) -> ModuleType:
    folder, name = os.path.split(path)
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), path)
    assert spec is not None, f"{path} isn't a Python file"
    assert spec.loader is not None, f"{path} isn't a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _join_group(rank: int, world_size: int, channel: Connection) -> None:
    """Set up process groups where a framework is installed that has them."""
    if importlib.util.find_spec("torch") is not None:
        importlib.import_module("hp_comm._torch.join").join_group(rank, world_size, channel)
