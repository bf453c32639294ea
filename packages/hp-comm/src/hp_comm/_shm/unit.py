"""One unit's channel: its parameters (gather.py) and its gradients (reduction.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm._shm.gather import UnitGather, unit_segment_bytes
from hp_comm._shm.reduction import UnitReduction
from hp_comm.errors import CommError
from hp_comm.plan import itemsize
from hp_comm.trace import note_collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm._shm.ring import GradRing
    from hp_comm._shm.seat import Seat
    from hp_comm._shm.segment import Segment
    from hp_comm._shm.watch import Watch
    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps

__all__ = ["ShmUnit", "UnitContext", "unit_segment_bytes"]

PUNCH_VARIABLE = "HP_SHM_PUNCH"
"""Set to 1 to give the physical pages of a unit back whenever all ranks have freed it."""


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What all units of a group share."""

    seat: Seat
    """This process's place in the group."""

    ops: ArrayOps
    """The tensor operations."""

    watch: Watch
    """Waits for the others."""

    ring: GradRing
    """Where gradients travel."""


class ShmUnit:
    """Implements `hp_comm.ports.UnitChannel` over shared memory.

    Args:
        context: What all units of the group share.
        plan: The unit's parameters.
        label: Its name in errors and traces.
        number: Which unit of the group it is, the same on all ranks.
        segment: Its memory; closed here.
    """

    def __init__(
        self, context: UnitContext, plan: UnitPlan, label: str, *, number: int, segment: Segment
    ) -> None:
        seat = context.seat
        self._seat = seat
        self._watch = context.watch
        self._plan = plan
        self._label = label
        self._is_closed = False
        try:
            self._gather = UnitGather(
                seat,
                context.ops,
                context.watch,
                plan=plan,
                label=label,
                segment=segment,
                keep_pages=os.environ.get(PUNCH_VARIABLE, "0") != "1",
            )
        finally:
            segment.close()
        self._reduction = UnitReduction(
            seat, context.ops, context.ring, plan=plan, unit=(label, number)
        )
        self._reduce_bytes = (seat.num_ranks - 1) * sum(
            spec.boxes[seat.index].num_elements * itemsize(spec.reduce_dtype)
            for spec in plan.params
            if spec.trainable
        )

    @property
    def plan(self) -> UnitPlan:
        """The plan this channel was opened with."""
        return self._plan

    def gather(self, shards: Sequence[Array]) -> None:
        """Start to make every parameter whole."""
        self._check()
        self._gather.start(shards)
        self._note("all_gather", self._gather.wire_bytes, self._gather.round)

    def wait_gather(self) -> tuple[Array, ...]:
        """Return the full parameters, readable until `free`."""
        self._check()
        return self._gather.finish()

    def free(self) -> None:
        """Give the full parameters back."""
        if not self._is_closed:
            self._gather.free()

    def reduce(self, grads: Sequence[Array | None], factor: float) -> None:
        """Start to add the full gradients over the ranks."""
        self._check()
        number = self._reduction.start(grads, factor)
        self._note("reduce_scatter", self._reduce_bytes, number)

    def wait_reduce(self) -> tuple[Array | None, ...]:
        """Return this rank's boxes of the reduced gradients, in new memory."""
        self._check()
        return self._reduction.finish()

    def close(self) -> None:
        """Let go of the memory; it is unmapped when no array refers to it any more."""
        if not self._is_closed:
            self._is_closed = True
            self._gather.free()
            self._reduction.close()
            del self._gather, self._reduction

    def _check(self) -> None:
        if self._is_closed:
            raise CommError(f"unit {self._label!r} was closed. Open it again.")
        self._watch.check()

    def _note(self, kind: str, wire_bytes: int, sequence: int) -> None:
        note_collective(
            kind,
            group=self._seat.name,
            transport="shm",
            wire_bytes=wire_bytes,
            label=self._label,
            sequence=sequence,
        )
