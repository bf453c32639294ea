"""Collectives as functions, and the communicator behind them.

    all_reduce(tensor, mesh)          over a 1-D mesh
    all_reduce(tensor, (mesh, "dp"))  along one axis
    all_reduce(tensor)                over all ranks

The framework is the array's, else the group's, else the one that is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hp_comm.errors import CommError
from hp_mesh._framework import FRAMEWORKS, current_framework, framework_of, load_adapter

if TYPE_CHECKING:
    from hp_comm.ports import Array, Communicator, ReduceOp, Work
    from hp_mesh._framework import Framework


def communicator(
    group: object | None = None, *, transport: str = "auto", timeout_s: float | None = None
) -> Communicator:
    """Return the communicator of a group; made once per group and transport.

    All ranks of the group call this alike.

    Args:
        group: A 1-D mesh, `(mesh, axis)`, the framework's process group, or None for all ranks.
        transport: "auto" picks shared memory for CPU ranks of one host, else the process group's
            backend; "shm" raises where shared memory can't serve. `HP_TRANSPORT` replaces "auto".
        timeout_s: How long a wait lasts, in seconds; None: `HP_TIMEOUT_S`, else 300. Counts when
            the communicator is made.

    Raises:
        CommError: An argument is wrong, or there is no process group.
        TransportError: The transport asked for by name can't serve this group.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> communicator().transport, communicator().ranks
        ('local', (0,))
        >>> dist.destroy_process_group()
    """
    framework = framework_of(group) or current_framework()
    return _communicator(framework, group, transport, timeout_s)


def all_gather_into(
    output: Array, source: Array, group: object | None = None, *, async_op: bool = False
) -> Work | None:
    """Concatenate every rank's `source` in `output`, by group index.

    Args:
        output: "n*k", contiguous, same data type as `source`.
        source: "k", contiguous, same length on every rank.
        group: See `communicator`.
        async_op: Return a `Work` instead of waiting.

    Raises:
        CommError: The arrays don't fit the operation or the group; nothing was sent.
        CommTimeoutError: A rank didn't come in time.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> output = torch.empty(2)
        >>> all_gather_into(output, torch.tensor([1.0, 2.0]))
        >>> output
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    return _for_array(output, group).all_gather_into(output, source, async_op=async_op)


def reduce_scatter_into(
    output: Array,
    source: Array,
    group: object | None = None,
    *,
    op: ReduceOp = "sum",
    async_op: bool = False,
) -> Work | None:
    """Reduce every rank's `source` elementwise and keep this rank's part in `output`.

    Args:
        output: "k", contiguous, same data type as `source`.
        source: "n*k", contiguous.
        group: See `communicator`.
        op: "sum", "avg", "max", "min" or "prod".
        async_op: Return a `Work` instead of waiting.

    Raises:
        CommError: The arrays don't fit the operation or the group; nothing was sent.
        CommTimeoutError: A rank didn't come in time.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> output = torch.empty(2)
        >>> reduce_scatter_into(output, torch.tensor([1.0, 2.0]), op="avg")
        >>> output
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    return _for_array(output, group).reduce_scatter_into(output, source, op=op, async_op=async_op)


def all_reduce(
    array: Array, group: object | None = None, *, op: ReduceOp = "sum", async_op: bool = False
) -> Work | None:
    """Reduce every rank's `array` elementwise, in place, on every rank.

    Args:
        array: Contiguous, same shape and data type on every rank.
        group: See `communicator`.
        op: "sum", "avg", "max", "min" or "prod".
        async_op: Return a `Work` instead of waiting.

    Raises:
        CommError: The arrays don't fit the operation or the group; nothing was sent.
        CommTimeoutError: A rank didn't come in time.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> array = torch.tensor([1.0, 2.0])
        >>> work = all_reduce(array, async_op=True)
        >>> work.wait()
        >>> array
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    return _for_array(array, group).all_reduce(array, op=op, async_op=async_op)


def broadcast(
    array: Array, group: object | None = None, *, source: int = 0, async_op: bool = False
) -> Work | None:
    """Overwrite `array` on every rank by that of one rank.

    Args:
        array: Contiguous, same shape and data type on every rank.
        group: See `communicator`.
        source: Group index of the rank whose array it becomes.
        async_op: Return a `Work` instead of waiting.

    Raises:
        CommError: The arrays don't fit the operation or the group; nothing was sent.
        CommTimeoutError: A rank didn't come in time.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> array = torch.tensor([1.0, 2.0])
        >>> broadcast(array, source=0)
        >>> array
        tensor([1., 2.])
        >>> dist.destroy_process_group()
    """
    return _for_array(array, group).broadcast(array, source=source, async_op=async_op)


def barrier(group: object | None = None, *, timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called this.

    Args:
        group: See `communicator`.
        timeout_s: How long to wait, in seconds; None: the communicator's.

    Raises:
        CommTimeoutError: A rank didn't come in time.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> barrier()
        >>> dist.destroy_process_group()
    """
    communicator(group).barrier(timeout_s=timeout_s)


def _for_array(array: Array, group: object | None) -> Communicator:
    """Return the communicator of a group in the framework of an array."""
    framework = framework_of(array)
    if framework is None:
        raise CommError(
            f"a collective was asked for on a {type(array).__name__}, which is no tensor of "
            f"{FRAMEWORKS}. Pass a tensor; hp_comm.testing.run_threads works on numpy arrays."
        )
    return _communicator(framework, group, "auto", None)


def _communicator(
    framework: Framework, group: object | None, transport: str, timeout_s: float | None
) -> Communicator:
    adapter = load_adapter("hp_comm", framework)
    made = adapter.communicator(group, transport=transport, timeout_s=timeout_s)
    return cast("Communicator", made)
