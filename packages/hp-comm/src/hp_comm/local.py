"""The transport of a group of one rank: nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_comm.errors import CommError
from hp_comm.trace import note_collective, note_copy
from hp_comm.verify import (
    check_all_gather,
    check_array,
    check_reduce_scatter,
    check_source,
    check_unit_arrays,
    check_value,
)
from hp_comm.wire import nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, Work


class DoneWork:
    """The work of a collective that is over when the call returns."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Tell that it is over."""
        return True


class LocalCommunicator:
    """Implements `hp_comm.ports.Communicator` for a group of one.

    Args:
        name: The group's name in traces.
        rank: This process's global rank.
        ops: The tensor operations.

    Example:
        >>> from hp_comm.testing import NumpyOps
        >>> LocalCommunicator("world", 0, NumpyOps()).all_gather_bytes(b"mine")
        [b'mine']
    """

    transport = "local"
    index = 0

    def __init__(self, name: str, rank: int, ops: ArrayOps) -> None:
        self.name = name
        self.ranks = (rank,)
        self.ops = ops

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Copy `source` to `output`."""
        check_all_gather(self.ops, output, source, 1)
        self._note("all_gather")
        self.ops.copy(output, self.ops.reshape(source, output.shape))
        return DoneWork() if async_op else None

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Copy `source` to `output`."""
        check_reduce_scatter(self.ops, output, source, op, 1)
        self._note("reduce_scatter")
        self.ops.copy(output, self.ops.reshape(source, output.shape))
        return DoneWork() if async_op else None

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Leave the array as it is."""
        check_array(self.ops, array, op)
        self._note("all_reduce")
        return DoneWork() if async_op else None

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Leave the array as it is."""
        check_array(self.ops, array)
        check_source(source, 1)
        self._note("broadcast")
        return DoneWork() if async_op else None

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return at once."""
        self._note("barrier")

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return this rank's bytes."""
        check_value(value)
        return [value]

    def open_unit(self, plan: UnitPlan, *, label: str) -> LocalUnit:
        """Return a channel that moves nothing.

        Raises:
            CommError: The plan is for another number of ranks.
        """
        if plan.world_size != 1:
            raise CommError(
                f"unit {label!r} was planned for {plan.world_size} ranks and opened on group "
                f"{self.name!r} of one. Plan it with world_size=1."
            )
        return LocalUnit(self, plan, label)

    def close(self) -> None:
        """Do nothing: there is no memory or descriptor."""

    def _note(self, kind: str) -> None:
        note_collective(kind, group=self.name, transport=self.transport, wire_bytes=0)


class LocalUnit:
    """Implements `hp_comm.ports.UnitChannel` for a group of one.

    A full parameter is the shard itself, unless it has to be cast: what changes one changes both.

    Args:
        communicator: The group of one.
        plan: The unit's parameters.
        label: The unit's name in traces.
    """

    def __init__(self, communicator: LocalCommunicator, plan: UnitPlan, label: str) -> None:
        self._comm = communicator
        self._ops = communicator.ops
        self._plan = plan
        self._label = label
        self._cast: dict[int, Array] = {}
        self._whole = [(spec.name, spec.shape) for spec in plan.params]
        self._full: tuple[Array, ...] | None = None
        self._is_closed = False
        self._grads: Sequence[Array | None] | None = None
        self._factor = 1.0

    @property
    def plan(self) -> UnitPlan:
        """The plan this channel was opened with."""
        return self._plan

    def gather(self, shards: Sequence[Array]) -> None:
        """Cast the shards that need it.

        Raises:
            CommError: A shard doesn't fit its parameter, or the full parameters weren't freed.
        """
        self._check()
        if self._full is not None:
            raise CommError(
                f"gather of unit {self._label!r} was called and its full parameters weren't "
                f"freed. Call free first."
            )
        check_unit_arrays(self._label, "shard", shards, self._whole)
        self._note("all_gather")
        self._full = tuple(self._make_full(index, shard) for index, shard in enumerate(shards))

    def wait_gather(self) -> tuple[Array, ...]:
        """Return the full parameters.

        Raises:
            CommError: No gather was started.
        """
        self._check()
        if self._full is None:
            raise CommError(
                f"wait_gather of unit {self._label!r} was called without a gather before it. Call "
                f"gather first."
            )
        return self._full

    def free(self) -> None:
        """Forget the full parameters, which are the shards."""
        self._full = None

    def reduce(self, grads: Sequence[Array | None], factor: float) -> None:
        """Keep the gradients for `wait_reduce`.

        Raises:
            CommError: A reduction is under way, or a gradient doesn't fit its parameter.
        """
        self._check()
        check_unit_arrays(self._label, "gradient", grads, self._whole)
        if self._grads is not None:
            raise CommError(
                f"a second reduction of unit {self._label!r} was started. Call wait_reduce first."
            )
        self._note("reduce_scatter")
        self._grads, self._factor = grads, factor

    def wait_reduce(self) -> tuple[Array | None, ...]:
        """Return the gradients in new memory, cast and scaled.

        Raises:
            CommError: No reduction was started.
        """
        self._check()
        grads, self._grads = self._grads, None
        if grads is None:
            raise CommError(
                f"wait_reduce of unit {self._label!r} was called without a reduction under way. "
                f"Call reduce first."
            )
        return tuple(
            None if grad is None or not spec.trainable else self._finish(grad, spec.reduce_dtype)
            for grad, spec in zip(grads, self._plan.params, strict=True)
        )

    def close(self) -> None:
        """Drop references to the memory."""
        self._cast, self._full, self._grads = {}, None, None
        self._is_closed = True

    def _check(self) -> None:
        if self._is_closed:
            raise CommError(f"unit {self._label!r} was closed. Open it again.")

    def _make_full(self, index: int, shard: Array) -> Array:
        """Return the shard itself, or what it is cast to: the same array in every cycle."""
        spec = self._plan.params[index]
        if self._ops.dtype_of(shard) == spec.compute_dtype:
            return shard
        if index not in self._cast:
            self._cast[index] = self._ops.empty(spec.shape, spec.compute_dtype)
        self._ops.copy(self._cast[index], shard)
        note_copy("all_gather", copied_bytes=spec.full_bytes, label=self._label)
        return self._cast[index]

    def _finish(self, grad: Array, dtype: str) -> Array:
        made = self._ops.empty(grad.shape, dtype)
        self._ops.copy(made, grad)
        note_copy("reduce_scatter", copied_bytes=nbytes(self._ops, made), label=self._label)
        if self._factor != 1.0:
            self._ops.scale(made, self._factor)
        return made

    def _note(self, kind: str) -> None:
        note_collective(
            kind, group=self._comm.name, transport="local", wire_bytes=0, label=self._label
        )
