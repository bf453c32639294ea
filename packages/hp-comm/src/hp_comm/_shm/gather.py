"""A unit's full parameters: one segment that every rank writes its boxes to and reads whole.

    line per rank    WRITTEN: last round whose boxes this rank wrote; RELEASED: last round that
                     it has finished reading
    parameters       page-aligned start; each in its compute dtype at a multiple of 64 bytes

A rank writes through a shared mapping (casting on the way), and reads through a private one: an
in-place edit of a full parameter stays in the process that made it, and is gone at the next round.
Full parameters are leased: nobody writes a new round before everybody has released the last one,
so a shard may change on a fast rank while a slow one still reads.

The mapping stays at its address for life, so that saved views of the full parameters stay valid
between rounds. Its pages are kept, or given back when the last rank has released them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_comm._shm.counters import LINE_BYTES, Counters
from hp_comm._shm.pages import PrivatePages
from hp_comm._shm.segment import align, round_to_pages
from hp_comm.errors import CommError
from hp_comm.plan import itemsize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm._shm.kernel import Mapping
    from hp_comm._shm.seat import Seat
    from hp_comm._shm.segment import Segment
    from hp_comm._shm.watch import Watch
    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps

_WRITTEN, _RELEASED, _DONE = 0, 1, 2


def _data_offset(num_ranks: int) -> int:
    return round_to_pages(num_ranks * LINE_BYTES)


def _offsets(plan: UnitPlan) -> tuple[list[int], int]:
    """Return where each full parameter starts after the lines, and where the last one ends."""
    starts, place = [], 0
    for spec in plan.params:
        starts.append(place)
        place = align(place + spec.full_bytes)
    return starts, place


def unit_segment_bytes(plan: UnitPlan) -> int:
    """Return the length of a unit's segment."""
    return _data_offset(plan.world_size) + round_to_pages(_offsets(plan)[1])


class UnitGather:
    """The parameter side of a unit.

    Args:
        seat: This process's place in the group.
        ops: The tensor operations.
        watch: Waits for the others.
        plan: The unit's parameters.
        label: Its name in errors.
        segment: Its memory.
        keep_pages: Keep physical pages when the parameters are freed.
    """

    def __init__(
        self,
        seat: Seat,
        ops: ArrayOps,
        watch: Watch,
        *,
        plan: UnitPlan,
        label: str,
        segment: Segment,
        keep_pages: bool,
    ) -> None:
        self._ops = ops
        self._watch = watch
        self._plan = plan
        self._label = label
        self._keep_pages = keep_pages
        self._num_ranks = seat.num_ranks
        self._data_offset = _data_offset(seat.num_ranks)
        self._shared = segment.map()
        private = segment.map(private=True, offset_bytes=self._data_offset)
        self._pages = PrivatePages(private)
        self._counters = Counters(self._shared, 0, seat.num_ranks, seat.index)
        if seat.index == 0:
            self._counters.clear()
        starts, _end = _offsets(plan)
        self._full = tuple(self._views(private, 0, starts))
        targets = self._views(self._shared, self._data_offset, starts)
        self._own_shapes = tuple(spec.boxes[seat.index].sizes for spec in plan.params)
        self._writes = tuple(
            (index, ops.box(target, spec.boxes[seat.index]))
            for index, (target, spec) in enumerate(zip(targets, plan.params, strict=True))
            if spec.boxes[seat.index].num_elements
        )
        self._round = 0
        self._is_free = True
        self.wire_bytes = sum(
            (spec.num_elements - spec.boxes[seat.index].num_elements) * itemsize(spec.compute_dtype)
            for spec in plan.params
        )

    @property
    def round(self) -> int:
        """Number of the last round, counted from 1."""
        return self._round

    def start(self, shards: Sequence[Array]) -> None:
        """Write this rank's boxes of a new round.

        Raises:
            CommError: The parameters weren't freed, or a shard doesn't fit its box.
        """
        self._check(shards)
        self._round += 1
        self._is_free = False
        self._wait(_RELEASED, self._round - 1)
        copy = self._ops.copy
        for index, place in self._writes:
            copy(place, shards[index])
        self._counters.publish(_WRITTEN, self._round)

    def finish(self) -> tuple[Array, ...]:
        """Return the full parameters of the round."""
        if self._is_free:
            raise CommError(
                f"wait_gather of unit {self._label!r} was called without a gather before it. Call "
                f"gather first."
            )
        self._wait(_WRITTEN, self._round)
        self._pages.drop_own()
        return self._full

    def free(self) -> None:
        """End this rank's lease of the full parameters; nothing where there is none."""
        if self._is_free:
            return
        self._is_free = True
        if not self._keep_pages:
            self._counters.publish(_DONE, self._round)
            if not self._counters.missing(_DONE, self._round):
                self._pages.drop_own()
                # Nobody writes before this rank has released, so a second punch does no harm.
                self._shared.punch(self._data_offset, self._shared.num_bytes - self._data_offset)
        self._counters.publish(_RELEASED, self._round)

    def _views(self, mapping: Mapping, offset_bytes: int, starts: Sequence[int]) -> list[Array]:
        return [
            self._ops.from_buffer(mapping.buffer, spec.shape, spec.compute_dtype, offset_bytes + s)
            for spec, s in zip(self._plan.params, starts, strict=True)
        ]

    def _wait(self, word: int, value: int) -> None:
        self._watch.wait(self._counters, (word, value), (f"gather of {self._label}", self._round))

    def _check(self, shards: Sequence[Array]) -> None:
        if not self._is_free:
            raise CommError(
                f"gather of unit {self._label!r} was called and its full parameters weren't "
                f"freed. Call free first."
            )
        if len(shards) != len(self._own_shapes):
            raise CommError(
                f"gather of unit {self._label!r} was given {len(shards)} shards for "
                f"{len(self._own_shapes)} parameters. Pass one per parameter, empty ones included."
            )
        for index, shape in enumerate(self._own_shapes):
            if tuple(shards[index].shape) != shape:
                raise CommError(
                    f"gather of unit {self._label!r} was given a shard of shape "
                    f"{tuple(shards[index].shape)} for parameter "
                    f"{self._plan.params[index].name!r}; this rank's box has shape {shape}. Pass "
                    f"the local part."
                )
