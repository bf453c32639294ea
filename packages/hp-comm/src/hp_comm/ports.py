"""What hp_comm's core asks of a framework and of a transport.

The core moves bytes between ranks but never looks inside a tensor. A framework adapter gives it
`ArrayOps` (views, copies, sums) and `Rendezvous` (a key-value store that all ranks reach); a
transport gives users of a group `Communicator`, and `fully_shard` a `UnitChannel` per unit.

    port           who provides it                     who asks
    Array          the framework's own tensor          nobody looks inside
    ArrayOps       _torch, testing (numpy)             transports, unit channels
    Rendezvous     _torch (c10d store), testing        transports, when a group is made
    Communicator   shm, _torch (c10d), testing         users, hp_checkpoint, unit channels
    UnitChannel    shm, collective (over any group)    hp_fully_shard's executor
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from hp_comm.plan import UnitPlan
    from hp_mesh import Box

ReduceOp = Literal["sum", "avg", "max", "min", "prod"]


@runtime_checkable
class Array(Protocol):
    """A framework's dense tensor. Only its shape is read here; all else goes through `ArrayOps`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dims, in elements."""
        ...


class ArrayOps(Protocol):
    """The few tensor operations that moving bytes needs, without autograd.

    Data types travel by name: "float32", "bfloat16", "int64", "bool", ...
    """

    def dtype_of(self, array: Array) -> str:
        """Return the name of the array's data type."""
        ...

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Return new, uninitialised, contiguous host memory."""
        ...

    def from_buffer(
        self, buffer: memoryview, shape: Sequence[int], dtype: str, offset_bytes: int
    ) -> Array:
        """Return a contiguous array over the buffer's own memory, which it keeps alive."""
        ...

    def copy(self, target: Array, source: Array) -> None:
        """Write `source` into `target` of the same shape, casting on the way."""
        ...

    def add(self, target: Array, left: Array, right: Array) -> None:
        """Write `left + right` into `target`; all have one shape, any may be the same array."""
        ...

    def combine(self, target: Array, other: Array, op: ReduceOp) -> None:
        """Fold `other` into `target` in place ("avg" adds; the caller scales at the end)."""
        ...

    def scale(self, target: Array, factor: float) -> None:
        """Multiply in place (integers: divide by the rounded reciprocal, towards zero)."""
        ...

    def fill_zero(self, target: Array) -> None:
        """Set every element to zero."""
        ...

    def box(self, array: Array, box: Box) -> Array:
        """Return the view of a full array that a box describes."""
        ...

    def reshape(self, array: Array, shape: Sequence[int]) -> Array:
        """Return a view of a contiguous array with another shape; error where a copy is needed."""
        ...

    def is_contiguous(self, array: Array) -> bool:
        """Tell whether the elements lie in row-major order without gaps."""
        ...

    def extend(self, array: Array, num_elements: int) -> Array | None:
        """Return a 1-D array of `num_elements` that starts at the same memory, or None.

        None where the storage ends earlier or the array isn't contiguous: a padded shard's
        storage has room for its padding, anything else does not.
        """
        ...


class Rendezvous(Protocol):
    """A key-value store that every rank of the job reaches; used to set groups up."""

    def put(self, key: str, value: bytes) -> None:
        """Store a value once."""
        ...

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """Return the value as soon as somebody stored it.

        Raises:
            TimeoutError: Nobody did in time.
        """
        ...


class Work(Protocol):
    """A collective that was started and may still run."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the output may be read; raises `CommTimeoutError` after the time-out."""
        ...

    def is_completed(self) -> bool:
        """Tell, without waiting, whether `wait` would return at once."""
        ...


class UnitChannel(Protocol):
    """Moves one unit's parameters and gradients between the ranks of one group.

    Calls per cycle: `gather`, `wait_gather`, `free`; and `reduce`, `wait_reduce`. All ranks make
    them in the same order. At most one gather and one reduction of a channel are in flight. A call
    at the wrong place, or after `close`, raises CommError and changes nothing.
    """

    @property
    def plan(self) -> UnitPlan:
        """The plan this channel was opened with."""
        ...

    def gather(self, shards: Sequence[Array]) -> None:
        """Start to make every parameter whole; `shards[i]` is this rank's box of parameter i.

        Casts to the compute dtype on the way. The shards may be changed once `wait_gather` (or
        `free`) returned: a transport may still read them until then.
        """
        ...

    def wait_gather(self) -> tuple[Array, ...]:
        """Return the full parameters, readable until `free`.

        The arrays are the same objects in every cycle of this channel.
        """
        ...

    def free(self) -> None:
        """Give the full parameters back: nothing of them is read until the next gather."""
        ...

    def reduce(self, grads: Sequence[Array | None], factor: float) -> None:
        """Start to add the full gradients over the ranks and multiply the sum by `factor`.

        `grads[i]` is None where this rank has no gradient for parameter i (unused or frozen).
        The gradients may be changed or freed once `wait_reduce` returned.
        """
        ...

    def wait_reduce(self) -> tuple[Array | None, ...]:
        """Return this rank's boxes of the reduced gradients, in the reduce dtype, in new memory.

        None where no rank had a gradient.
        """
        ...

    def close(self) -> None:
        """Release memory and descriptors; local, idempotent."""
        ...


class Communicator(Protocol):
    """Collectives over one group of ranks, on one transport.

    Every call is made by all ranks of the group in the same order. With `async_op=True` a call
    returns a `Work` to wait for, else None. Every wait ends within `timeout_s` with
    `CommTimeoutError`, which names group, operation, sequence number and missing ranks.
    """

    @property
    def name(self) -> str:
        """The group's name in errors and traces, for example "world" or "dp"."""
        ...

    @property
    def transport(self) -> str:
        """Which transport moves the bytes: "shm", "gloo", "nccl", "hccl", "thread", "local"."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, by group index."""
        ...

    @property
    def index(self) -> int:
        """This process's index in `ranks`."""
        ...

    @property
    def ops(self) -> ArrayOps:
        """The tensor operations of the framework this communicator was made for."""
        ...

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate every rank's `source` in `output`, by group index.

        Args:
            output: "n*k", contiguous, same dtype as `source`.
            source: "k", contiguous, same length on every rank.
            async_op: Return a `Work` instead of waiting.
        """
        ...

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` elementwise and keep this rank's part in `output`.

        Args:
            output: "k", contiguous, same dtype as `source`.
            source: "n*k", contiguous; part i goes to group index i.
            op: How to reduce; "avg" is the sum divided by the group's size.
            async_op: Return a `Work` instead of waiting.
        """
        ...

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array` elementwise, in place, on every rank."""
        ...

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        ...

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank of the group has called this."""
        ...

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes (any length, also 0), by group index."""
        ...

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit; collective, memory is set aside here."""
        ...

    def close(self) -> None:
        """Release the group's memory and descriptors; local, idempotent."""
        ...


CommunicatorFactory = Callable[[], Communicator]
