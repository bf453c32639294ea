"""Runs the scheduler's actions: moves bytes through hp_comm, binds tensors through the adapter.

Framework-free. At most two reductions are in flight: a unit's gradients are published before the
reduction of the unit before it is finished, so that a rank that is a little late costs nothing.

Source: the order (free first, then reduce; finish one behind) is that of PyTorch FSDP2.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_fully_shard.actions import (
    Accumulate,
    Action,
    Await,
    Discard,
    Drain,
    Free,
    Gather,
    Reduce,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hp_comm.ports import UnitChannel
    from hp_fully_shard.ports import Binding, Span

MAX_REDUCTIONS_IN_FLIGHT = 2


@dataclass(slots=True)
class ExecutedUnit:
    """What the executor needs of one unit."""

    label: str
    """Name in profiles and errors."""

    channel: UnitChannel | None
    """Moves the unit's bytes; None where the unit holds no parameter."""

    binding: Binding
    """Where the framework keeps the unit's tensors."""

    full_bytes: int = 0
    """Size of the unit's full parameters in the compute dtype."""

    factor: float = 1.0
    """What the sum of the ranks' gradients is multiplied by."""


class Executor:
    """Runs actions on units.

    Args:
        units: One entry per unit, by the scheduler's numbers.
        span: Makes a named range for the framework's profiler.
    """

    def __init__(self, units: Sequence[ExecutedUnit], span: Span) -> None:
        self._units = units
        self._span = span
        self._reducing: deque[int] = deque()
        self.full_bytes = 0
        self.peak_full_bytes = 0

    def run(self, actions: Iterable[Action]) -> None:
        """Run actions in their order; `QueueEnd` is the adapter's and skipped here."""
        for action in actions:
            if isinstance(action, Gather):
                self._gather(self._units[action.unit])
            elif isinstance(action, Await):
                self._await(self._units[action.unit])
            elif isinstance(action, Free):
                self._free(self._units[action.unit])
            elif isinstance(action, Reduce):
                self._reduce(action.unit)
            elif isinstance(action, Accumulate):
                self._units[action.unit].binding.accumulate_grads()
            elif isinstance(action, Discard):
                self._units[action.unit].binding.discard_grads()
            elif isinstance(action, Drain):
                self._finish_until(0, keep=action.keep)

    def _gather(self, unit: ExecutedUnit) -> None:
        if unit.channel is None:
            return
        with self._span(f"FSDP::all_gather ({unit.label})"):
            unit.channel.gather(unit.binding.shards())
        self.full_bytes += unit.full_bytes
        self.peak_full_bytes = max(self.peak_full_bytes, self.full_bytes)

    def _await(self, unit: ExecutedUnit) -> None:
        if unit.channel is None:
            return
        with self._span(f"FSDP::all_gather_wait ({unit.label})"):
            unit.binding.bind_full(unit.channel.wait_gather())

    def _free(self, unit: ExecutedUnit) -> None:
        if unit.channel is None:
            return
        unit.binding.bind_shards()
        unit.channel.free()
        self.full_bytes -= unit.full_bytes

    def _reduce(self, number: int) -> None:
        unit = self._units[number]
        if unit.channel is None:
            return
        if number in self._reducing:  # a channel carries one reduction at a time
            self._finish_until(0)
        with self._span(f"FSDP::reduce_scatter ({unit.label})"):
            unit.channel.reduce(unit.binding.take_grads(), unit.factor)
        self._reducing.append(number)
        self._finish_until(MAX_REDUCTIONS_IN_FLIGHT - 1)

    def _finish_until(self, num_left: int, *, keep: bool = True) -> None:
        while len(self._reducing) > num_left:
            unit = self._units[self._reducing.popleft()]
            if unit.channel is None:
                continue
            with self._span(f"FSDP::reduce_scatter_wait ({unit.label})"):
                grads = unit.channel.wait_reduce()
            if keep:
                unit.binding.put_grads(grads)
