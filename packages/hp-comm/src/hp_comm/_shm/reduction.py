"""A unit's gradients: every rank writes the pieces that others own, and sums up its own.

The pieces go into the group's slots (ring.py), cast to the reduce dtype on the way. A rank's own
piece is read from its own gradient. Sums are taken in the order of the group index; a parameter
without a gradient on some ranks is the sum of the others, without one anywhere it is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm._shm.blocks import SMALLEST_BYTES, BlockPool
from hp_comm._shm.ring import NUM_SLOTS, GradRing, Slots, piece_offsets
from hp_comm.errors import CommError
from hp_comm.plan import itemsize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm._shm.seat import Seat
    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps
    from hp_mesh import Box


@dataclass(frozen=True, slots=True)
class _Places:
    """A unit's views into the slots, made once."""

    slots: Slots
    """Where they lie."""

    writes: list[list[list[tuple[Box, Array]]]]
    """By slot and parameter: where this rank writes which box for another owner."""

    reads: list[list[list[Array | None]]]
    """By slot, parameter and rank: what a rank wrote for this one; None for its own."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A reduction that was posted."""

    number: int
    grads: tuple[Array | None, ...]
    factor: float
    places: _Places


class UnitReduction:
    """The gradient side of a unit.

    Args:
        seat: This process's place in the group.
        ops: The tensor operations.
        ring: The group's slots.
        plan: The unit's parameters.
        unit: Its label, and its number in the group.
    """

    def __init__(
        self, seat: Seat, ops: ArrayOps, ring: GradRing, *, plan: UnitPlan, unit: tuple[str, int]
    ) -> None:
        self._seat = seat
        self._ops = ops
        self._ring = ring
        self._plan = plan
        self._label, self._unit = unit
        self._places: _Places | None = None
        self._flight: _Flight | None = None
        self._early: tuple[Array | None, ...] | None = None
        self._lengths_bytes = [
            spec.boxes[seat.index].num_elements * itemsize(spec.reduce_dtype)
            for spec in plan.params
        ]
        self._blocks = BlockPool(n for n in self._lengths_bytes if n >= SMALLEST_BYTES)
        ring.add_unit(self._unit, self._label)

    def start(self, grads: Sequence[Array | None], factor: float) -> int:
        """Write the pieces that others own; return the reduction's number.

        Raises:
            CommError: One is under way, or a gradient doesn't fit its parameter.
        """
        self._check(grads)
        number = self._ring.begin(self._label, self._finish_early)
        places = self._current_places()
        kept = tuple(
            grad if spec.trainable else None
            for grad, spec in zip(grads, self._plan.params, strict=True)
        )
        for grad, writes in zip(kept, places.writes[number % NUM_SLOTS], strict=True):
            if grad is not None:
                for box, place in writes:
                    self._ops.copy(place, self._ops.box(grad, box))
        flags = bytes(grad is not None for grad in kept)
        self._ring.post(places.slots, number, self._unit, flags)
        self._flight = _Flight(number, kept, factor, places)
        return number

    def finish(self) -> tuple[Array | None, ...]:
        """Return this rank's boxes of the sums.

        Raises:
            CommError: None was started.
        """
        if self._early is not None:
            sums, self._early = self._early, None
            return sums
        return self._finish()

    def _finish_early(self) -> None:
        """Sum up now, because a later reduction needs the slot; `finish` returns the result."""
        self._early = self._finish()

    def _finish(self) -> tuple[Array | None, ...]:
        flight = self._flight
        if flight is None:
            raise CommError(
                f"wait_reduce of unit {self._label!r} was called without a reduce before it. Call "
                f"reduce first."
            )
        slots = flight.places.slots
        flags = self._ring.arrive(slots, flight.number, self._unit, len(self._plan.params))
        reads = flight.places.reads[flight.number % NUM_SLOTS]
        sums = tuple(
            self._sum(index, reads[index], [row[index] for row in flags])
            for index in range(len(self._plan.params))
        )
        self._flight = None
        self._ring.finish(flight.number)
        return sums

    def close(self) -> None:
        """Drop what refers to memory; a reduction under way is given up."""
        if self._flight is not None:
            self._ring.finish(self._flight.number)
        self._flight = self._places = self._early = None

    def _check(self, grads: Sequence[Array | None]) -> None:
        if self._flight is not None or self._early is not None:
            raise CommError(
                f"reduce of unit {self._label!r} was called and the one before isn't finished. "
                f"Call wait_reduce first."
            )
        if len(grads) != len(self._plan.params):
            raise CommError(
                f"reduce of unit {self._label!r} was given {len(grads)} gradients for "
                f"{len(self._plan.params)} parameters. Pass one per parameter, None where there "
                f"is none."
            )
        for grad, spec in zip(grads, self._plan.params, strict=True):
            if grad is not None and tuple(grad.shape) != spec.shape:
                raise CommError(
                    f"reduce of unit {self._label!r} was given a gradient of shape "
                    f"{tuple(grad.shape)} for parameter {spec.name!r} of shape {spec.shape}. "
                    f"Pass the gradient of the full parameter."
                )

    def _sum(self, index: int, reads: Sequence[Array | None], flags: Sequence[int]) -> Array | None:
        """Return the scaled sum of one parameter's pieces, or None where nobody has one."""
        flight, spec, ops = self._flight, self._plan.params[index], self._ops
        if flight is None or not any(flags):
            return None
        own_box = spec.boxes[self._seat.index]
        total = self._new(index, own_box)
        if not own_box.num_elements:
            return total
        grad = flight.grads[index]
        own = None if grad is None else ops.box(grad, own_box)
        terms = [
            term
            for piece, flag in zip(reads, flags, strict=True)
            if flag and (term := own if piece is None else piece) is not None
        ]
        self._add(total, terms, own)
        if flight.factor != 1.0:
            ops.scale(total, flight.factor)
        return total

    def _new(self, index: int, box: Box) -> Array:
        num_bytes, dtype = self._lengths_bytes[index], self._plan.params[index].reduce_dtype
        if num_bytes < SMALLEST_BYTES:
            return self._ops.empty(box.sizes, dtype)
        return self._ops.from_buffer(self._blocks.take(num_bytes), box.sizes, dtype, 0)

    def _add(self, total: Array, terms: list[Array], own: Array | None) -> None:
        """Write the sum of the terms, in their order; `own` may have another data type."""
        ops, dtype = self._ops, self._ops.dtype_of(total)
        if own is not None and ops.dtype_of(own) != dtype:
            is_early = any(term is own for term in terms[:2])
            cast = total if is_early else ops.empty(total.shape, dtype)
            ops.copy(cast, own)
            terms = [cast if term is own else term for term in terms]
        if len(terms) == 1:
            if terms[0] is not total:
                ops.copy(total, terms[0])
            return
        ops.add(total, terms[0], terms[1])
        for term in terms[2:]:
            ops.combine(total, term, "sum")

    def _current_places(self) -> _Places:
        """Return the views into the group's present slots; made again where those are new."""
        slots = self._ring.slots
        assert slots is not None, "opening a unit makes the slots"
        if self._places is None or self._places.slots is not slots:
            self._places = self._make_places(slots)
        return self._places

    def _make_places(self, slots: Slots) -> _Places:
        offsets, params, own = piece_offsets(self._plan), self._plan.params, self._seat.index
        others = [rank for rank in range(self._seat.num_ranks) if rank != own]

        def view(slot: int, writer: int, owner: int, index: int) -> Array:
            place = slots.place(slot, writer) + offsets[owner][index]
            spec = params[index]
            sizes = spec.boxes[owner].sizes
            return self._ops.from_buffer(slots.mapping.buffer, sizes, spec.reduce_dtype, place)

        writes: list[list[list[tuple[Box, Array]]]] = []
        reads: list[list[list[Array | None]]] = []
        for slot in range(NUM_SLOTS):
            writes.append(
                [
                    [
                        (spec.boxes[owner], view(slot, own, owner, index))
                        for owner in others
                        if spec.trainable and spec.boxes[owner].num_elements
                    ]
                    for index, spec in enumerate(params)
                ]
            )
            reads.append(
                [
                    [
                        view(slot, rank, own, index)
                        if rank != own and spec.trainable and spec.boxes[own].num_elements
                        else None
                        for rank in range(self._seat.num_ranks)
                    ]
                    for index, spec in enumerate(params)
                ]
            )
        return _Places(slots, writes, reads)
