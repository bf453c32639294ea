"""Two slots per group in which gradients travel from the ranks that have them to their owners.

Reductions of all units of a group are numbered together; number k uses slot k mod 2. In a slot
every rank has an area of its own, which it alone writes: a head (unit, reduction, which parameters
have a gradient here), then the pieces for each owner. The slots are as large as the largest unit
needs; a larger unit gets new slots when it is opened, old ones live until nothing refers to them.

    begin     finish what this rank itself left unfinished two reductions ago (its unit keeps the
              result), then wait until all others have read what this rank wrote there
    post      the pieces are written
    arrive    wait for the others' pieces; their heads must say the same unit and reduction
    finish    this rank needs the others' pieces no more
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm._shm.board import REDUCTION_POSTED, REDUCTION_READ, mismatch
from hp_comm._shm.kernel import MASK
from hp_comm._shm.segment import align
from hp_comm.plan import ParamSpec, itemsize

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm._shm.counters import Counters
    from hp_comm._shm.kernel import Mapping
    from hp_comm._shm.seat import Seat
    from hp_comm._shm.segment import Segment
    from hp_comm._shm.watch import Watch
    from hp_comm.plan import UnitPlan

NUM_SLOTS = 2
_HEAD = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Slots:
    """The memory of the two slots."""

    mapping: Mapping
    """Of the segment they lie in."""

    area_bytes: int
    """Length of one rank's area in one slot."""

    num_ranks: int
    """Number of areas per slot."""

    def place(self, number: int, rank: int) -> int:
        """Return where a rank's area for a reduction starts, in bytes."""
        return (number % NUM_SLOTS * self.num_ranks + rank) * self.area_bytes


def piece_offsets(plan: UnitPlan) -> list[list[int]]:
    """Return where each owner's piece of each parameter starts in an area, in bytes.

    The first index is the owner, the second the parameter; one more owner than there are holds
    the end of the area. Frozen parameters take no room.
    """
    place = align(_HEAD.size + len(plan.params))
    offsets: list[list[int]] = []
    for owner in range(plan.world_size):
        row = []
        for spec in plan.params:
            row.append(place)
            place = align(place + _piece_bytes(spec, owner))
        offsets.append(row)
    return [*offsets, [place]]


def _piece_bytes(spec: ParamSpec, owner: int) -> int:
    return spec.boxes[owner].num_elements * itemsize(spec.reduce_dtype) if spec.trainable else 0


class GradRing:
    """The slots of one group and the numbers of its reductions.

    Args:
        seat: This process's place in the group.
        counters: The group's lines.
        watch: Waits for the others.
    """

    def __init__(self, seat: Seat, counters: Counters, watch: Watch) -> None:
        self.slots: Slots | None = None
        self._seat = seat
        self._counters = counters
        self._watch = watch
        self._last = 0
        self._unfinished: dict[int, Callable[[], None]] = {}
        self._labels: dict[int, str] = {}

    @property
    def area_bytes(self) -> int:
        """Length of one rank's area; 0 before the first unit."""
        return self.slots.area_bytes if self.slots is not None else 0

    def area_bytes_for(self, plan: UnitPlan) -> int:
        """Return how long an area a unit needs."""
        return piece_offsets(plan)[-1][0]

    def num_bytes_for(self, area_bytes: int) -> int:
        """Return the length of a segment with areas of this length."""
        return NUM_SLOTS * self._seat.num_ranks * area_bytes

    def use(self, segment: Segment, area_bytes: int) -> None:
        """Put the slots of all later reductions into a new segment, and close it."""
        try:
            self.slots = Slots(segment.map(), area_bytes, self._seat.num_ranks)
        finally:
            segment.close()

    def add_unit(self, unit: int, label: str) -> None:
        """Learn a unit's name, for errors."""
        self._labels[unit] = label

    def begin(self, label: str, finish_early: Callable[[], None]) -> int:
        """Return the number of a new reduction, once its area may be written.

        Args:
            label: Of the unit, for errors.
            finish_early: Called where a later reduction needs the slot before the unit has asked
                for its result; must end in `finish`.
        """
        number = self._last + 1
        while self._unfinished and min(self._unfinished) <= number - NUM_SLOTS:
            self._unfinished[min(self._unfinished)]()
        self._wait(REDUCTION_READ, number - NUM_SLOTS, label, number)
        self._last = number
        self._unfinished[number] = finish_early
        return number

    def post(self, slots: Slots, number: int, unit: int, flags: bytes) -> None:
        """Publish the pieces of a reduction.

        Args:
            slots: Where they were written.
            number: Of the reduction.
            unit: Number of the unit.
            flags: One byte per parameter: 1 where this rank has a gradient.
        """
        place = slots.place(number, self._seat.index)
        _HEAD.pack_into(slots.mapping.buffer, place, unit, number & MASK)
        start = place + _HEAD.size
        slots.mapping.buffer[start : start + len(flags)] = flags
        self._counters.publish(REDUCTION_POSTED, number)

    def arrive(self, slots: Slots, number: int, unit: int, num_flags: int) -> list[bytes]:
        """Return every rank's flags, once all pieces of a reduction may be read.

        Raises:
            CommTimeoutError: Somebody did not post in time.
            MismatchError: Somebody posted another unit's.
        """
        self._wait(REDUCTION_POSTED, number, self._labels[unit], number)
        buffer, flags = slots.mapping.buffer, []
        heads = []
        for rank in range(self._seat.num_ranks):
            place = slots.place(number, rank)
            heads.append(_HEAD.unpack_from(buffer, place))
            flags.append(bytes(buffer[place + _HEAD.size : place + _HEAD.size + num_flags]))
        if any(head != (unit, number & MASK) for head in heads):
            raise mismatch(self._seat, [self._describe(*head) for head in heads])
        return flags

    def finish(self, number: int) -> None:
        """Say that this rank needs the others' pieces of a reduction no more."""
        self._unfinished.pop(number, None)
        all_before = min(self._unfinished, default=self._last + 1) - 1
        self._counters.publish(REDUCTION_READ, all_before)

    def _wait(self, word: int, value: int, label: str, number: int) -> None:
        self._watch.wait(self._counters, (word, value), (f"reduce of {label}", number))

    def _describe(self, unit: int, number: int) -> str:
        return f"reduce of {self._labels.get(unit, f'unit {unit}')} number {number}"
