"""Collectives as functions, and the communicator behind them.

from hp_comm import all_reduce
all_reduce(tensor, mesh)          # over a 1-D mesh
all_reduce(tensor, (mesh, "dp"))  # along one axis
all_reduce(tensor)                # over all ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hp_mesh._framework import current_framework, framework_of, load_adapter

if TYPE_CHECKING:
    from hp_comm.ports import Array, Communicator, ReduceOp, Work


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
    """
    framework = framework_of(group) or current_framework()
    adapter = load_adapter("hp_comm", framework)
    made = adapter.communicator(group, transport=transport, timeout_s=timeout_s)
    return cast("Communicator", made)


def all_gather_into(
    output: Array, source: Array, group: object | None = None, *, async_op: bool = False
) -> Work | None:
    """Concatenate every rank's `source` in `output`, by group index.

    Args:
        output: "n*k", contiguous, same data type as `source`.
        source: "k", contiguous, same length on every rank.
        group: See `communicator`.
        async_op: Return a `Work` instead of waiting.
    """
    return communicator(group).all_gather_into(output, source, async_op=async_op)


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
    """
    return communicator(group).reduce_scatter_into(output, source, op=op, async_op=async_op)


def all_reduce(
    array: Array, group: object | None = None, *, op: ReduceOp = "sum", async_op: bool = False
) -> Work | None:
    """Reduce every rank's `array` elementwise, in place, on every rank.

    Args:
        array: Contiguous, same shape and data type on every rank.
        group: See `communicator`.
        op: "sum", "avg", "max", "min" or "prod".
        async_op: Return a `Work` instead of waiting.
    """
    return communicator(group).all_reduce(array, op=op, async_op=async_op)


def broadcast(
    array: Array, group: object | None = None, *, source: int = 0, async_op: bool = False
) -> Work | None:
    """Overwrite `array` on every rank by that of one rank.

    Args:
        array: Contiguous, same shape and data type on every rank.
        group: See `communicator`.
        source: Group index of the rank whose array it becomes.
        async_op: Return a `Work` instead of waiting.
    """
    return communicator(group).broadcast(array, source=source, async_op=async_op)


def barrier(group: object | None = None, *, timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called this.

    Args:
        group: See `communicator`.
        timeout_s: How long to wait, in seconds; None: the communicator's.
    """
    communicator(group).barrier(timeout_s=timeout_s)
