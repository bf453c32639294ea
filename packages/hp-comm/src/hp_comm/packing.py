"""Where each parameter lies in a transfer of its unit, and the copies to there and back.

A transfer is a direct parameter alone, or a bucket. It has one part per rank, all equally long; in
a part, each parameter has as much room as its largest shard. What a direct parameter's shards
leave free is padding at the end of the whole; nobody reads it.

Every byte that is copied here is reported to the trace.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hp_comm.plan import padded_shard_elements
from hp_comm.trace import note_copy
from hp_comm.wire import nbytes
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.plan import ParamSpec, UnitPlan
    from hp_comm.ports import Array, ArrayOps

Transfer = tuple[int, ...]
"""The parameters that travel together, by their index in the plan."""


class Packing:
    """Copies shards and gradients of one unit into transfers, and full parameters out of them.

    Args:
        ops: The tensor operations.
        plan: The unit's parameters.
        index: This rank's group index.
        label: The unit's name in traces.
    """

    def __init__(self, ops: ArrayOps, plan: UnitPlan, index: int, label: str) -> None:
        self._ops = ops
        self._plan = plan
        self._index = index
        self._label = label
        params = plan.params
        kept = [tuple(i for i in bucket if params[i].trainable) for bucket in plan.buckets]
        self.gathers: tuple[Transfer, ...] = (*((i,) for i in plan.direct), *plan.buckets)
        self.reductions: tuple[Transfer, ...] = (
            *((i,) for i in plan.direct if params[i].trainable),
            *(bucket for bucket in kept if bucket),
        )
        self._starts = {t: self._places(t) for t in {*self.gathers, *self.reductions}}

    def part_elements(self, transfer: Transfer) -> int:
        """Return the length of one rank's part."""
        return sum(padded_shard_elements(self._plan.params[index]) for index in transfer)

    def is_direct(self, transfer: Transfer) -> bool:
        """Tell whether the transfer is a direct parameter, not a bucket."""
        return transfer[0] in self._plan.direct

    def spec(self, transfer: Transfer) -> ParamSpec:
        """Return the first parameter, whose data types are those of all."""
        return self._plan.params[transfer[0]]

    def pack_shards(self, transfer: Transfer, shards: Sequence[Array]) -> Array:
        """Return this rank's part in the compute dtype; a direct one uncopied where it can be."""
        spec, length = self.spec(transfer), self.part_elements(transfer)
        shard = shards[transfer[0]]
        if self.is_direct(transfer) and self._ops.dtype_of(shard) == spec.compute_dtype:
            extended = self._ops.extend(shard, length)
            if extended is not None:
                return extended
        made = self._ops.empty((length,), spec.compute_dtype)
        self._zero_gaps(transfer, made, [math.prod(shards[index].shape) for index in transfer])
        for index, start in self._starts[transfer]:
            self._copy_in("all_gather", made, start, shards[index])
        return made

    def unpack(self, bucket: Transfer, whole: Array, full: Sequence[Array]) -> None:
        """Write a bucket that was gathered into the full parameters."""
        length = self.part_elements(bucket)
        for index, start in self._starts[bucket]:
            spec = self._plan.params[index]
            for rank, box in enumerate(spec.boxes):
                part = self._cut(whole, rank * length + start, box)
                self._ops.copy(self._ops.box(full[index], box), part)
            note_copy("all_gather", copied_bytes=spec.full_bytes, label=self._label)

    def pack_grads(self, transfer: Transfer, grads: Sequence[Array | None]) -> Array:
        """Return every rank's part in the reduce dtype; a direct one uncopied where it can be."""
        if self.is_direct(transfer):
            return self._direct_grad(transfer, grads[transfer[0]])
        length = self.part_elements(transfer)
        made = self._ops.empty((length * self._plan.world_size,), self.spec(transfer).reduce_dtype)
        self._ops.fill_zero(made)
        for rank in range(self._plan.world_size):
            for index, start in self._starts[transfer]:
                grad = grads[index]
                if grad is not None:
                    piece = self._ops.box(grad, self._plan.params[index].boxes[rank])
                    self._copy_in("reduce_scatter", made, rank * length + start, piece)
        return made

    def own_boxes(self, transfer: Transfer, part: Array) -> list[tuple[int, Array]]:
        """Return each parameter of a transfer with this rank's box of it, in a reduced part."""
        return [
            (index, self._cut(part, start, self._plan.params[index].boxes[self._index]))
            for index, start in self._starts[transfer]
        ]

    def prefix(self, flat: Array, shape: Sequence[int]) -> Array:
        """Return the start of a 1-D array as a view of this shape."""
        return self._ops.reshape(self._slice(flat, 0, math.prod(shape)), shape)

    def _places(self, transfer: Transfer) -> list[tuple[int, int]]:
        """Return each parameter and where its room starts in a part, in elements."""
        starts, place = [], 0
        for index in transfer:
            starts.append((index, place))
            place += padded_shard_elements(self._plan.params[index])
        return starts

    def _direct_grad(self, transfer: Transfer, grad: Array | None) -> Array:
        spec = self.spec(transfer)
        num_elements = self.part_elements(transfer) * self._plan.world_size
        if grad is not None and self._fits(spec, grad, num_elements):
            return self._ops.reshape(grad, (num_elements,))
        made = self._ops.empty((num_elements,), spec.reduce_dtype)
        self._zero(made, 0 if grad is None else spec.num_elements)
        if grad is not None:
            self._copy_in("reduce_scatter", made, 0, grad)
        return made

    def _fits(self, spec: ParamSpec, grad: Array, num_elements: int) -> bool:
        is_ready = num_elements == spec.num_elements and self._ops.is_contiguous(grad)
        return is_ready and self._ops.dtype_of(grad) == spec.reduce_dtype

    def _zero_gaps(self, transfer: Transfer, part: Array, held: Sequence[int]) -> None:
        """Clear what no shard fills, so that nobody is sent what lay in this memory before."""
        for (_, start), length, following in zip(
            self._starts[transfer], held, self._ends(transfer), strict=True
        ):
            self._zero(part, start + length, following)

    def _ends(self, transfer: Transfer) -> list[int]:
        return [*(start for _, start in self._starts[transfer][1:]), self.part_elements(transfer)]

    def _zero(self, flat: Array, start: int, stop: int | None = None) -> None:
        length = (flat.shape[0] if stop is None else stop) - start
        if length:
            self._ops.fill_zero(self._slice(flat, start, length))

    def _slice(self, flat: Array, start: int, num_elements: int) -> Array:
        return self._ops.box(flat, Box((start,), (num_elements,)))

    def _cut(self, flat: Array, start: int, box: Box) -> Array:
        return self._ops.reshape(self._slice(flat, start, box.num_elements), box.sizes)

    def _copy_in(self, kind: str, target: Array, start: int, source: Array) -> None:
        count = math.prod(source.shape)
        place = self._ops.reshape(self._slice(target, start, count), source.shape)
        self._ops.copy(place, source)
        note_copy(kind, copied_bytes=nbytes(self._ops, place), label=self._label)
