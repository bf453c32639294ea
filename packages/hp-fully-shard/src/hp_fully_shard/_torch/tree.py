"""All units under one root module, with the scheduler and the executor that serve them.

Note [who is the root]: the first sharded module whose forward is called becomes the root of a
tree that takes in every unit below it. When a module above is called later, its tree takes over
the units of the smaller one with their phases; no state is lost and no channel reopened.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function

from hp_fully_shard._torch.unit import Place, TorchUnit
from hp_fully_shard.actions import Action, QueueEnd
from hp_fully_shard.errors import ShardedStateError
from hp_fully_shard.executor import Executor
from hp_fully_shard.scheduler import Phase, Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterable

UNITS_ATTRIBUTE = "_hp_units"


def units_of(module: nn.Module) -> list[TorchUnit]:
    """Return the units whose parameters a call of this module needs."""
    found: list[TorchUnit] = module.__dict__.get(UNITS_ATTRIBUTE, [])
    return found


class Tree:
    """Units, scheduler and executor of one root module.

    Args:
        root: The module whose forward is the whole forward; a sharded one.
    """

    def __init__(self, root: nn.Module) -> None:
        labels = _labels(root)
        self.units = list(labels)
        self.root = units_of(root)[0]
        for unit in self.units:
            settle(unit)
        for unit, label in labels.items():
            asked = unit.reshard_after_forward
            unit.settings.reshard_after_forward = unit is not self.root if asked is None else asked
            with outside_inference():
                unit.prepare(label)
        self.scheduler = Scheduler(
            [unit.settings for unit in self.units],
            root=self._number(self.root),
            phases=[_phase(unit) for unit in self.units],
            owing=[n for n, unit in enumerate(self.units) if unit.binding.has_accumulated()],
        )
        self.executor = Executor([unit.executed for unit in self.units], record_function)
        for number, unit in enumerate(self.units):
            unit.place = Place(self, number)
        self.resolve_prefetch()

    def resolve_prefetch(self) -> None:
        """Turn the prefetch lists of the units into numbers of this tree."""
        for unit in self.units:
            unit.settings.forward_prefetch = self._numbers(unit.forward_prefetch)
            chosen = unit.backward_prefetch
            unit.settings.backward_prefetch = None if chosen is None else self._numbers(chosen)

    def refresh(self, number: int) -> None:
        """Notice what was done to the shards of a unit; all ranks must have done the same.

        Full parameters whose shards changed are freed, so that they are gathered again. Where
        type, device or need of gradient changed, the channel is opened again.
        """
        unit = self.units[number]
        if self.scheduler.is_full(number) and (not unit.is_prepared or unit.binding.is_stale()):
            self.run(self.scheduler.reshard(number))
        if unit.is_prepared:
            return
        with outside_inference():
            unit.prepare(unit.label)

    def run(self, actions: Iterable[Action]) -> None:
        """Run the scheduler's actions."""
        with outside_inference():
            for action in actions:
                if isinstance(action, QueueEnd):
                    engine = Variable._execution_engine
                    engine.queue_callback(self._on_backward_end)
                else:
                    self.executor.run((action,))

    def gradient_arrived(self, number: int) -> None:
        """Take note of a gradient of a unit's full parameter."""
        actions = self.scheduler.gradient_arrived(number)
        if actions:
            self.run(actions)

    def _on_backward_end(self) -> None:
        leftover = [n for n, unit in enumerate(self.units) if unit.binding.has_grads()]
        self.run(self.scheduler.backward_end(leftover))

    def _number(self, unit: TorchUnit) -> int:
        return self.units.index(unit)

    def _numbers(self, units: list[TorchUnit]) -> tuple[int, ...]:
        return tuple(self._number(unit) for unit in units if unit in self.units)


def settle(unit: TorchUnit) -> None:
    """Put a backward of the unit's tree right that an exception broke off.

    Raises:
        ShardedStateError: The backward isn't broken, it runs.
    """
    if unit.place is None or not unit.place.tree.scheduler.in_backward:
        return
    if inside_backward():
        raise ShardedStateError(
            f"unit {unit.label!r} is in the middle of a backward. Wait for its end; and let the "
            f"first call of a sharded model be that of its outermost module."
        )
    unit.place.tree.run(unit.place.tree.scheduler.recover())


def _labels(root: nn.Module) -> dict[TorchUnit, str]:
    """Return every unit at or below the root with the name of its first module."""
    labels: dict[TorchUnit, str] = {}
    for name, module in root.named_modules():
        for unit in units_of(module):
            labels.setdefault(unit, name or type(root).__name__.removeprefix("HSDP"))
    return labels


def _phase(unit: TorchUnit) -> Phase:
    if unit.place is None:
        return Phase.SHARDED
    return unit.place.tree.scheduler.phase(unit.place.number)


def outside_inference() -> AbstractContextManager[object]:
    """Leave inference mode, if it is on: what is made here is used for training, too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def inside_backward() -> bool:
    """Whether this thread is inside a backward pass (then a forward is recompute)."""
    return bool(torch._C._current_graph_task_id() != -1)
