"""A unit channel over any communicator's collectives.

A direct parameter's padded shards concatenate to its full storage, so it is gathered straight
into it; the rest is packed into buckets (see plan.py). Gradients go the same way back.

Note [used flags]: a parameter that this rank didn't use has no gradient here, but other ranks may
have one. Each reduction carries one number per parameter: how many ranks had a gradient. A rank
that had one need not look; a rank that had none reads the number when the reduction is finished.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from hp_comm.plan import ParamSpec, UnitPlan, itemsize, padded_shard_elements
from hp_comm.trace import muted, note_collective, note_copy
from hp_comm.wire import nbytes
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    grads: Sequence[Array | None]
    factor: float
    flags: Array
    works: list[Work] = field(default_factory=list)
    outputs: dict[int, Array] = field(default_factory=dict)
    sources: list[Array] = field(default_factory=list)


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
        self._padded: dict[int, Array] = {}
        self._full = tuple(self._make_full(index) for index in range(len(plan.params)))
        self._works: list[Work] = []
        self._packed: list[tuple[tuple[int, ...], Array]] = []
        self._sources: list[Array] = []
        self._reduction: _Reduction | None = None
        self._release()

    @property
    def plan(self) -> UnitPlan:
        """The plan this channel was opened with."""
        return self._plan

    def gather(self, shards: Sequence[Array]) -> None:
        """Start to make every parameter whole."""
        self._note("all_gather", [spec.compute_dtype for spec in self._plan.params])
        self._restore()
        with muted():
            for index in self._plan.direct:
                source = self._padded_shard(index, shards[index])
                self._start(self._padded[index], source)
            for bucket in self._plan.buckets:
                source = self._pack_shards(bucket, shards)
                whole = self._flat(self._world * source.shape[0], self._spec(bucket).compute_dtype)
                self._packed.append((bucket, whole))
                self._start(whole, source)

    def wait_gather(self) -> tuple[Array, ...]:
        """Return the full parameters, readable until `free`."""
        for work in self._works:
            work.wait()
        for bucket, whole in self._packed:
            self._unpack(bucket, whole)
        self._works, self._packed, self._sources = [], [], []
        return self._full

    def free(self) -> None:
        """Give the full parameters back."""
        self._release()

    def reduce(self, grads: Sequence[Array | None], factor: float) -> None:
        """Start to add the full gradients over the ranks."""
        specs = self._plan.params
        self._note("reduce_scatter", [s.reduce_dtype if s.trainable else "" for s in specs])
        flags = self._flags(grads)
        reduction = _Reduction(grads, factor, flags)
        with muted():
            for index in self._plan.direct:
                if specs[index].trainable:
                    source = self._padded_grad(index, grads[index])
                    self._start_reduce(reduction, index, source)
            for bucket in self._trainable_buckets():
                self._start_reduce(reduction, bucket[0], self._pack_grads(bucket, grads))
            work = self._comm.all_reduce(flags, async_op=True)
        reduction.works.append(cast("Work", work))
        self._reduction = reduction

    def wait_reduce(self) -> tuple[Array | None, ...]:
        """Return this rank's boxes of the reduced gradients, in new memory."""
        reduction, self._reduction = self._reduction, None
        assert reduction is not None, "wait_reduce without reduce"
        for work in reduction.works:
            work.wait()
        used = self._used(reduction)
        found: list[Array | None] = [None] * len(self._plan.params)
        for first, output in reduction.outputs.items():
            if reduction.factor != 1.0:
                self._ops.scale(output, reduction.factor)
            for index, own in self._cut(first, output):
                if used[index]:
                    found[index] = own
        return tuple(found)

    def close(self) -> None:
        """Drop references to the memory."""
        self._works, self._packed, self._sources = [], [], []
        self._reduction = None

    @property
    def _world(self) -> int:
        return self._plan.world_size

    def _flat(self, num_elements: int, dtype: str) -> Array:
        return self._ops.empty((num_elements,), dtype)

    def _spec(self, bucket: Sequence[int]) -> ParamSpec:
        return self._plan.params[bucket[0]]

    def _make_full(self, index: int) -> Array:
        spec = self._plan.params[index]
        if index not in self._plan.direct:
            return self._ops.empty(spec.shape, spec.compute_dtype)
        self._padded[index] = self._flat(
            padded_shard_elements(spec) * self._world, spec.compute_dtype
        )
        return self._prefix(self._padded[index], spec.num_elements, spec.shape)

    def _prefix(self, flat: Array, num_elements: int, shape: Sequence[int]) -> Array:
        return self._ops.reshape(self._slice(flat, 0, num_elements), shape)

    def _slice(self, flat: Array, start: int, num_elements: int) -> Array:
        return self._ops.box(flat, _segment(start, num_elements))

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

    def _start(self, whole: Array, source: Array) -> None:
        self._sources.append(source)
        self._works.append(cast("Work", self._comm.all_gather_into(whole, source, async_op=True)))

    def _start_reduce(self, reduction: _Reduction, first: int, source: Array) -> None:
        dtype = self._plan.params[first].reduce_dtype
        output = self._flat(source.shape[0] // self._world, dtype)
        work = self._comm.reduce_scatter_into(output, source, async_op=True)
        reduction.sources.append(source)
        reduction.outputs[first] = output
        reduction.works.append(cast("Work", work))

    def _padded_shard(self, index: int, shard: Array) -> Array:
        """Return a direct parameter's shard with its padding; uncopied where it has room."""
        spec = self._plan.params[index]
        length = padded_shard_elements(spec)
        if spec.storage_dtype == spec.compute_dtype:
            extended = self._ops.extend(shard, length)
            if extended is not None:
                return extended
        made = self._flat(length, spec.compute_dtype)
        own = spec.boxes[self._comm.index]
        self._copy_in("all_gather", made, 0, shard)
        self._zero(made, own.num_elements)
        return made

    def _padded_grad(self, index: int, grad: Array | None) -> Array:
        """Return a direct parameter's gradient with its padding; uncopied where it needs none."""
        spec = self._plan.params[index]
        length = padded_shard_elements(spec) * self._world
        if grad is not None and self._is_ready(spec, grad, length):
            return self._ops.reshape(grad, (length,))
        made = self._flat(length, spec.reduce_dtype)
        if grad is not None:
            self._copy_in("reduce_scatter", made, 0, grad)
        self._zero(made, 0 if grad is None else spec.num_elements)
        return made

    def _is_ready(self, spec: ParamSpec, grad: Array, length: int) -> bool:
        fits = length == spec.num_elements and self._ops.dtype_of(grad) == spec.reduce_dtype
        return fits and self._ops.is_contiguous(grad)

    def _pack_shards(self, bucket: Sequence[int], shards: Sequence[Array]) -> Array:
        made = self._flat(self._bucket_elements(bucket), self._spec(bucket).compute_dtype)
        self._ops.fill_zero(made)
        for index, start in self._starts(bucket):
            self._copy_in("all_gather", made, start, shards[index])
        return made

    def _unpack(self, bucket: Sequence[int], whole: Array) -> None:
        length = self._bucket_elements(bucket)
        for index, start in self._starts(bucket):
            for rank, box in enumerate(self._plan.params[index].boxes):
                part = self._prefix_at(whole, rank * length + start, box)
                self._ops.copy(self._ops.box(self._full[index], box), part)
            copied = self._plan.params[index].full_bytes
            note_copy("all_gather", copied_bytes=copied, label=self._label)

    def _pack_grads(self, bucket: Sequence[int], grads: Sequence[Array | None]) -> Array:
        length = self._bucket_elements(bucket)
        made = self._flat(length * self._world, self._spec(bucket).reduce_dtype)
        self._ops.fill_zero(made)
        for index, start in self._starts(bucket):
            grad = grads[index]
            if grad is None:
                continue
            for rank, box in enumerate(self._plan.params[index].boxes):
                self._copy_in(
                    "reduce_scatter", made, rank * length + start, self._ops.box(grad, box)
                )
        return made

    def _cut(self, first: int, output: Array) -> list[tuple[int, Array]]:
        """Return this rank's boxes in the reduced array that starts with this parameter."""
        own = self._comm.index
        if first in self._plan.direct:
            return [(first, self._prefix_at(output, 0, self._plan.params[first].boxes[own]))]
        (bucket,) = (bucket for bucket in self._trainable_buckets() if bucket[0] == first)
        return [
            (index, self._prefix_at(output, start, self._plan.params[index].boxes[own]))
            for index, start in self._starts(bucket)
        ]

    def _trainable_buckets(self) -> list[tuple[int, ...]]:
        params = self._plan.params
        kept = [tuple(i for i in bucket if params[i].trainable) for bucket in self._plan.buckets]
        return [bucket for bucket in kept if bucket]

    def _starts(self, bucket: Sequence[int]) -> list[tuple[int, int]]:
        """Return each parameter of a bucket and where its part starts, in elements."""
        starts, place = [], 0
        for index in bucket:
            starts.append((index, place))
            place += padded_shard_elements(self._plan.params[index])
        return starts

    def _bucket_elements(self, bucket: Sequence[int]) -> int:
        return sum(padded_shard_elements(self._plan.params[index]) for index in bucket)

    def _prefix_at(self, flat: Array, start: int, box: Box) -> Array:
        return self._ops.reshape(self._slice(flat, start, box.num_elements), box.sizes)

    def _copy_in(self, kind: str, target: Array, start: int, source: Array) -> None:
        count = math.prod(source.shape)
        place = self._ops.reshape(self._slice(target, start, count), source.shape)
        self._ops.copy(place, source)
        note_copy(kind, copied_bytes=nbytes(self._ops, place), label=self._label)

    def _zero(self, flat: Array, start: int) -> None:
        if start < flat.shape[0]:
            self._ops.fill_zero(self._slice(flat, start, flat.shape[0] - start))

    def _flags(self, grads: Sequence[Array | None]) -> Array:
        """Return one number per parameter: 1 where this rank has a gradient."""
        values = array("f", [0.0 if grad is None else 1.0 for grad in grads])
        flags = self._flat(len(grads), FLAG_DTYPE)
        self._ops.copy(flags, self._on_host(values))
        return flags

    def _used(self, reduction: _Reduction) -> list[bool]:
        """Return which parameters any rank had a gradient for; see Note [used flags]."""
        used = [grad is not None for grad in reduction.grads]
        if not all(used):
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


def _segment(start: int, num_elements: int) -> Box:
    return Box((start,), (num_elements,))
