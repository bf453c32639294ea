"""Ranks as threads of one process over real shared memory: segments, sockets and futexes included.

Where `run_threads` replaces the transport, this runs the one of real processes, in milliseconds.
"""

from __future__ import annotations

import tempfile
import threading
from typing import TYPE_CHECKING, TypeVar

from hp_comm._shm import connect
from hp_comm.errors import CommTimeoutError
from hp_comm.testing.folder import FolderRendezvous
from hp_comm.testing.numpy_ops import NumpyOps

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm.ports import ArrayOps, Communicator

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 20.0


def run_shm_threads(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ops: ArrayOps | None = None,
) -> list[T]:
    """Call `function(communicator, *args)` on threads and return the results by rank.

    Args:
        function: What every rank runs.
        world_size: Number of threads, at least 1.
        *args: Passed on.
        timeout_s: The group's time-out, in seconds.
        ops: The tensor operations; numpy's if left out.

    Raises:
        BaseException: What the first rank that failed raised; time-outs come last.

    Example:
        >>> run_shm_threads(lambda comm: comm.all_gather_bytes(b"%d" % comm.index), 2)
        [[b'0', b'1'], [b'0', b'1']]
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(index: int, folder: str) -> None:
        communicator: Communicator | None = None
        try:
            communicator = connect(
                name="threads",
                ranks=tuple(range(world_size)),
                index=index,
                rendezvous=FolderRendezvous(folder),
                ops=ops or NumpyOps(),
                timeout_s=timeout_s,
                key="group",
            )
            results[index] = function(communicator, *args)
        except BaseException as error:  # re-raised by the caller below
            errors.append(error)
        finally:
            if communicator is not None:
                communicator.close()

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=run, args=(i, folder)) for i in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, CommTimeoutError))
    return [results[index] for index in range(world_size)]
