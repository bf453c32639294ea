"""A unit channel over any communicator's collectives.

A direct parameter's padded shards concatenate to its full storage, so it is gathered straight
into it; the rest is packed into buckets (see plan.py). Gradients go the same way back.

Note [used flags]: a parameter that this rank didn't use has no gradient here, but other ranks may
have one. Each reduction carries one number per parameter: how many ranks had a gradient. A rank
that had one need not look; a rank that had none reads the number when the reduction is finished.

Note [uncopied shards]: where a shard's storage has room for its padding, it is sent as it lies.
On a transport that moves bytes after the call, it must not change until `wait_gather`.

Note [failed transfers]: a wait that ended with an error doesn't end the transfer, which may go on
to write. The memory is kept then, also by `free`, and the unit refuses every further call.
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from hp_comm.errors import CommError, MismatchError
from hp_comm.packing import Packing, Transfer
from hp_comm.plan import itemsize
from hp_comm.trace import muted, note_collective
from hp_comm.verify import check_unit_arrays

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, Communicator, Work

FLAG_DTYPE = "float32"


@runtime_checkable
class ReleasingOps(Protocol):
    """Array operations that can give the memory of an array back and get it again."""

    def release(self, array: Array) -> None:
        """Give the memory back; the array keeps its identity and shape."""
        ...

    def restore(self, array: Array) -> None:
        """Get the memory again, uninitialised."""
        ...


@dataclass(slots=True)
class _Reduction:
    """One that was started: what it needs until it is finished."""

    grads: Sequence[Array | None]
    factor: float
    flags: Array | None = None
    works: list[Work] = field(default_factory=list)
    outputs: list[tuple[Transfer, Array]] = field(default_factory=list)
    sources: list[Array] = field(default_factory=list)


def open_unit(communicator: Communicator, plan: UnitPlan, label: str) -> CollectiveUnit:
    """Return a unit channel over a communicator's collectives, once all ranks have one plan.

    Args:
        communicator: Moves the bytes.
        plan: How the unit's parameters travel.
        label: The unit's name in traces.

    Raises:
        CommError: The plan is for another number of ranks.
        MismatchError: The ranks have different plans.

    Example:
        >>> from hp_comm.testing import run_threads
        >>> from hp_comm.testing.units import chunked_plan
        >>> plan = chunked_plan(2, [((4, 3), 0)])
        >>> run_threads(lambda comm: open_unit(comm, plan, "layers.0").plan == plan, 2)
        [True, True]
    """
    ranks = communicator.ranks
    if plan.world_size != len(ranks):
        raise CommError(
            f"unit {label!r} was planned for {plan.world_size} ranks and opened on group "
            f"{communicator.name!r} of {len(ranks)}. Plan it with that world_size."
        )
    digest = hashlib.sha256(repr(plan).encode()).hexdigest()[:16]
    own = f"{label!r} with {len(plan.params)} parameters, plan {digest}"
    found = [raw.decode() for raw in communicator.all_gather_bytes(own.encode())]
    if len(set(found)) > 1:
        each = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, found, strict=True))
        raise MismatchError(
            f"ranks of group {communicator.name!r} open different units: {each}. Build the same "
            f"model and make the same calls on every rank."
        )
    return CollectiveUnit(communicator, plan, label)


class CollectiveUnit:
    """Implements `hp_comm.ports.UnitChannel` with a communicator's collectives.

    Args:
        communicator: Moves the bytes.
        plan: How the unit's parameters travel.
        label: The unit's name in traces.
    """

    def __init__(self, communicator: Communicator, plan: UnitPlan, label: str) -> None:
        self._comm = communicator
        self._ops: ArrayOps = communicator.ops
        self._label = label
        self._plan = plan
        self._packing = Packing(self._ops, plan, communicator.index, label)
        own = communicator.index
        self._shards = [(spec.name, spec.boxes[own].sizes) for spec in plan.params]
        self._grads = [(spec.name, spec.shape) for spec in plan.params]
        self._padded: dict[int, Array] = {}
        self._full = tuple(self._make_full(index) for index in range(len(plan.params)))
        self._works: list[Work] = []
        self._packed: list[tuple[Transfer, Array]] = []
        self._sources: list[Array] = []
        self._reduction: _Reduction | None = None
        self._is_free = True
        self._refusal = ""
        self._release()

    @property
    def plan(self) -> UnitPlan:
        """The plan this channel was opened with."""
        return self._plan

    def gather(self, shards: Sequence[Array]) -> None:
        """Start to make every parameter whole; see Note [uncopied shards].

        Raises:
            CommError: A shard doesn't fit its box, or the full parameters weren't freed.
        """
        self._check()
        if not self._is_free:
            raise CommError(
                f"gather of unit {self._label!r} was called and its full parameters weren't "
                f"freed. Call free first."
            )
        check_unit_arrays(self._label, "shard", shards, self._shards)
        self._note("all_gather", [spec.compute_dtype for spec in self._plan.params])
        self._restore()
        self._is_free = False
        with self._refusing("gather"), muted():
            for transfer in self._packing.gathers:
                source = self._packing.pack_shards(transfer, shards)
                if not self._packing.is_direct(transfer):
                    whole = self._flat(source.shape[0] * self._world, self._ops.dtype_of(source))
                    self._packed.append((transfer, whole))
                else:
                    whole = self._padded[transfer[0]]
                if source.shape[0]:
                    self._sources.append(source)
                    work = self._comm.all_gather_into(whole, source, async_op=True)
                    self._works.append(cast("Work", work))

    def wait_gather(self) -> tuple[Array, ...]:
        """Return the full parameters, readable until `free`.

        Raises:
            CommError: No gather was started.
        """
        self._check()
        if self._is_free:
            raise CommError(
                f"wait_gather of unit {self._label!r} was called without a gather before it. Call "
                f"gather first."
            )
        self._finish_gather()
        for bucket, whole in self._packed:
            self._packing.unpack(bucket, whole, self._full)
        self._packed = []
        return self._full

    def free(self) -> None:
        """Give the full parameters back; a gather that nobody waited for is waited for first."""
        if self._is_free or self._refusal:
            return
        self._finish_gather()
        self._packed = []
        self._release()
        self._is_free = True

    def reduce(self, grads: Sequence[Array | None], factor: float) -> None:
        """Start to add the full gradients over the ranks.

        Raises:
            CommError: A reduction is under way, or a gradient doesn't fit its parameter.
        """
        specs = self._plan.params
        self._check()
        check_unit_arrays(self._label, "gradient", grads, self._grads)
        if self._reduction is not None:
            raise CommError(
                f"a second reduction of unit {self._label!r} was started. Call wait_reduce first."
            )
        self._note("reduce_scatter", [s.reduce_dtype if s.trainable else "" for s in specs])
        kept = [g if s.trainable else None for g, s in zip(grads, specs, strict=True)]
        self._reduction = reduction = _Reduction(kept, factor)
        if not self._packing.reductions:  # nothing trains, on any rank
            return
        reduction.flags = self._flags(kept)
        with self._refusing("reduction"), muted():
            for transfer in self._packing.reductions:
                self._start_reduce(reduction, transfer)
            work = self._comm.all_reduce(reduction.flags, async_op=True)
        reduction.works.append(cast("Work", work))

    def wait_reduce(self) -> tuple[Array | None, ...]:
        """Return this rank's boxes of the reduced gradients, in new memory.

        Raises:
            CommError: No reduction was started.
        """
        self._check()
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            raise CommError(
                f"wait_reduce of unit {self._label!r} was called without a reduction under way. "
                f"Call reduce first."
            )
        with self._refusing("reduction"):
            for work in reduction.works:
                work.wait()
        used = self._used(reduction)
        found: list[Array | None] = [None] * len(self._plan.params)
        for transfer, part in reduction.outputs:
            if reduction.factor != 1.0:
                self._ops.scale(part, reduction.factor)
            for index, own in self._packing.own_boxes(transfer, part):
                if used[index]:
                    found[index] = own
        return tuple(found)

    def close(self) -> None:
        """Drop references to the memory; transfers under way keep theirs."""
        self._refusal = self._refusal or f"unit {self._label!r} was closed. Open it again."
        self._full, self._padded = (), {}
        self._packed, self._reduction = [], None

    @property
    def _world(self) -> int:
        return self._plan.world_size

    def _flat(self, num_elements: int, dtype: str) -> Array:
        return self._ops.empty((num_elements,), dtype)

    def _make_full(self, index: int) -> Array:
        spec = self._plan.params[index]
        if index not in self._plan.direct:
            return self._ops.empty(spec.shape, spec.compute_dtype)
        length = self._packing.part_elements((index,)) * self._world
        self._padded[index] = self._flat(length, spec.compute_dtype)
        return self._packing.prefix(self._padded[index], spec.shape)

    def _release(self) -> None:
        if isinstance(self._ops, ReleasingOps):
            for array in self._memory():
                self._ops.release(array)

    def _restore(self) -> None:
        if isinstance(self._ops, ReleasingOps):
            for array in self._memory():
                self._ops.restore(array)

    def _memory(self) -> list[Array]:
        return [self._padded.get(index, full) for index, full in enumerate(self._full)]

    def _finish_gather(self) -> None:
        with self._refusing("gather"):
            for work in self._works:
                work.wait()
        self._works, self._sources = [], []

    def _check(self) -> None:
        if self._refusal:
            raise CommError(self._refusal)

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Refuse all further calls after an error inside; see Note [failed transfers]."""
        try:
            yield
        except BaseException as error:
            self._refusal = (
                f"unit {self._label!r} can't be used any more: a {what} failed ({error}). Make "
                f"another process group, and the unit again."
            )
            raise

    def _start_reduce(self, reduction: _Reduction, transfer: Transfer) -> None:
        source = self._packing.pack_grads(transfer, reduction.grads)
        part = self._flat(source.shape[0] // self._world, self._ops.dtype_of(source))
        reduction.outputs.append((transfer, part))
        if source.shape[0]:
            reduction.sources.append(source)
            work = self._comm.reduce_scatter_into(part, source, async_op=True)
            reduction.works.append(cast("Work", work))

    def _flags(self, grads: Sequence[Array | None]) -> Array:
        """Return one number per parameter: 1 where this rank has a gradient."""
        values = array("f", [0.0 if grad is None else 1.0 for grad in grads])
        flags = self._flat(len(grads), FLAG_DTYPE)
        self._ops.copy(flags, self._on_host(values))
        return flags

    def _used(self, reduction: _Reduction) -> list[bool]:
        """Return which parameters any rank had a gradient for; see Note [used flags]."""
        used = [grad is not None for grad in reduction.grads]
        all_used = all(u or not s.trainable for u, s in zip(used, self._plan.params, strict=True))
        if reduction.flags is not None and not all_used:
            values = array("f", bytes(4 * len(used)))
            self._ops.copy(self._on_host(values), reduction.flags)
            used = [value > 0 for value in values]
        return used

    def _on_host(self, values: array[float]) -> Array:
        return self._ops.from_buffer(memoryview(values).cast("B"), (len(values),), FLAG_DTYPE, 0)

    def _note(self, kind: str, dtypes: Sequence[str]) -> None:
        own = self._comm.index
        held = [spec.boxes[own].num_elements for spec in self._plan.params]
        if kind == "all_gather":
            moved = [s.num_elements - h for s, h in zip(self._plan.params, held, strict=True)]
        else:
            moved = [(self._world - 1) * h for h in held]
        note_collective(
            kind,
            group=self._comm.name,
            transport=self._comm.transport,
            wire_bytes=sum(m * itemsize(d) for m, d in zip(moved, dtypes, strict=True) if d),
            label=self._label,
        )
