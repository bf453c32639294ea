"""Which unit is gathered, freed or reduced, and when.

Pure: sees unit numbers, never tensors. Events come from an adapter, actions go to the executor.
One scheduler belongs to one tree of units (one root module).

    event             in SHARDED        in GATHERING   in FULL
    before_forward    Gather, Await     Await          -
    after_forward     -                 -              Free if the unit's last open call ended and
                                                       it reshards, or if no backward will come
    before_backward   Gather, Await     Await          - (then Gather the unit that comes next)
    after_backward    Reduce            -              Free, Reduce, once no call is awaited
    backward_end      Reduce if owed    Await, Free    Free, Reduce if owed; last of all Drain

Invariants:
    A unit is reduced once per backward: when the backward of the last of its forward calls is
    through, or at the end of the backward if that is never seen (inputs without gradient, calls
    whose output the loss does not use). Without synchronisation `Reduce` becomes `Accumulate`.
    After `backward_end` nothing is awaited, and only units that asked to stay full are full.
    A forward inside a backward is recompute: it gathers what it needs, frees nothing, prefetches
    nothing and is not awaited again if its first run is.
    A backward that was broken off is noticed at the next forward: its gradients are dropped, its
    units freed.

Source: ZeRO stage 3 (Rajbhandari et al., 2020); backward prefetch in reverse forward order as in
PyTorch FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hp_fully_shard.actions import (
    Accumulate,
    Action,
    Await,
    Discard,
    Drain,
    Free,
    Gather,
    QueueEnd,
    Reduce,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Phase(Enum):
    """Where the full parameters of a unit are."""

    SHARDED = "sharded"
    """Only this rank's shards are in memory."""

    GATHERING = "gathering"
    """The gather was started; the modules still see the shards."""

    FULL = "full"
    """The modules see the full parameters."""


@dataclass(slots=True)
class UnitSettings:
    """What a user may set per unit, also between two steps."""

    trainable: bool = True
    """Whether any parameter of the unit needs a gradient."""

    empty: bool = False
    """Whether the unit holds no parameter at all (it is never gathered or reduced)."""

    num_members: int = 1
    """Modules that share this unit as one list; their calls in one forward count as one."""

    reshard_after_forward: bool = True
    """Free after forward; the backward gathers again."""

    reshard_after_backward: bool = True
    """Free after backward."""

    sync: bool = True
    """Reduce gradients over the ranks after backward, instead of keeping them on this rank."""

    forward_prefetch: tuple[int, ...] = ()
    """Units to gather when this one's forward starts."""

    backward_prefetch: tuple[int, ...] | None = None
    """Units to gather when this one's backward starts; None: the one that ran before it."""


@dataclass(slots=True)
class _UnitState:
    phase: Phase = Phase.SHARDED
    open_calls: int = 0
    members_done: set[int] = field(default_factory=set)
    awaited: int = 0
    in_backward: bool = False
    finished: bool = False
    owes_reduce: bool = False


class Scheduler:
    """Turns events of units into actions.

    Args:
        settings: One entry per unit, in the order in which units are drained. The entries are
            read at each event, so changing a field takes effect at once.
        root: Number of the unit whose forward is the whole forward.
        phases: Where each unit's parameters are already; None: all are sharded.
        owing: Units that hold gradients of earlier backwards that weren't reduced.

    Example:
        >>> scheduler = Scheduler([UnitSettings()], root=0)
        >>> scheduler.before_forward(0)
        [Gather(unit=0), Await(unit=0)]
        >>> scheduler.after_forward(0, awaits_backward=True)
        [Free(unit=0)]
        >>> scheduler.before_backward(0)
        [QueueEnd(), Gather(unit=0), Await(unit=0)]
        >>> scheduler.after_backward(0)
        [Free(unit=0), Reduce(unit=0)]
        >>> scheduler.backward_end()
        [Drain(keep=True)]
    """

    def __init__(
        self,
        settings: Sequence[UnitSettings],
        *,
        root: int,
        phases: Sequence[Phase] | None = None,
        owing: Collection[int] = (),
    ) -> None:
        self.settings = settings
        self._root = root
        self._units = [_UnitState(phase) for phase in phases or [Phase.SHARDED] * len(settings)]
        for unit in owing:
            self._units[unit].owes_reduce = True
        self._order: list[int] = []
        self._in_backward = False

    @property
    def in_backward(self) -> bool:
        """Whether a backward of this tree was started and has not been reported as ended."""
        return self._in_backward

    def phase(self, unit: int) -> Phase:
        """Return where the unit's full parameters are."""
        return self._units[unit].phase

    def is_full(self, unit: int) -> bool:
        """Return whether the modules see the unit's full parameters."""
        return self._units[unit].phase is Phase.FULL

    def awaits_backward(self, unit: int) -> bool:
        """Return whether a call of the unit has run whose backward has not."""
        return self._units[unit].awaited > 0

    def before_forward(
        self, unit: int, *, member: int | None = None, inside_backward: bool = False
    ) -> list[Action]:
        """Return what must happen before a module of the unit runs its forward.

        Args:
            unit: The unit whose module is called.
            member: Which module of a list unit is called; None for any other call.
            inside_backward: The call comes from within a backward pass: recompute.
        """
        actions: list[Action] = []
        if not inside_backward:
            actions += self.recover()
            if unit == self._root and self._begins_round(unit, member):
                actions += self._start_over()
            self._units[unit].open_calls += 1
        actions += self._need(unit)
        if not inside_backward:
            for other in self.settings[unit].forward_prefetch:
                actions += self._start(other)
        return actions

    def after_forward(
        self,
        unit: int,
        *,
        awaits_backward: bool,
        member: int | None = None,
        inside_backward: bool = False,
    ) -> list[Action]:
        """Return what must happen after a module of the unit ran its forward.

        Args:
            unit: The unit whose module was called.
            awaits_backward: Some output needs a gradient.
            member: Which module of a list unit ran; None for any other call.
            inside_backward: The call came from within a backward pass: recompute.
        """
        state = self._units[unit]
        if inside_backward:
            return self._after_recompute(unit, awaits_backward)
        state.open_calls = max(0, state.open_calls - 1)
        if awaits_backward:
            state.awaited += 1
            self._order.append(unit)
        if member is not None:
            state.members_done.add(member)
            if len(state.members_done) < self.settings[unit].num_members:
                return []
            state.members_done.clear()
        actions: list[Action] = []
        if not state.open_calls:
            actions += self._free_after_forward(unit)
        if unit == self._root:
            actions += self._free_strays()
        return actions

    def gradient_arrived(self, unit: int) -> list[Action]:
        """Return what must happen when a full parameter of the unit has got a gradient.

        Mostly nothing: `before_backward` came first. It did not where the loss depends on the unit
        other than through outputs that the adapter can see.
        """
        state = self._units[unit]
        actions: list[Action] = [] if self._in_backward else [QueueEnd()]
        self._in_backward = True
        state.in_backward = True
        state.finished = False
        return actions

    def before_backward(self, unit: int) -> list[Action]:
        """Return what must happen when a gradient of one of the unit's outputs arrives."""
        actions: list[Action] = []
        if not self._in_backward:
            self._in_backward = True
            actions.append(QueueEnd())
        state = self._units[unit]
        state.in_backward = True
        state.finished = False
        actions += self._need(unit)
        for other in self._next_in_backward(unit):
            actions += self._start(other)
        return actions

    def after_backward(self, unit: int) -> list[Action]:
        """Return what must happen when the backward of one call of the unit is through."""
        state = self._units[unit]
        if not state.in_backward:
            return []
        state.awaited = max(0, state.awaited - 1)
        return [] if state.awaited else self._finish(unit)

    def backward_end(self, leftover: Collection[int] = ()) -> list[Action]:
        """Return what must happen when the outermost backward has ended.

        Args:
            leftover: Units that hold gradients which arrived after their reduction.
        """
        actions: list[Action] = []
        for unit, state in enumerate(self._units):
            late = unit in leftover
            owed = state.in_backward or state.awaited > 0
            owed = owed or (state.owes_reduce and self.settings[unit].sync)
            if late or (owed and not state.finished):
                actions += self._finish(unit)
            elif self.settings[unit].reshard_after_backward:
                actions += self._free(unit)
        actions.append(Drain())
        self._forget_backward()
        return actions

    def unshard(self, unit: int, *, wait: bool = True) -> list[Action]:
        """Return what a user's explicit unshard takes; without `wait` it is only started."""
        return self._need(unit) if wait else self._start(unit)

    def reshard(self, unit: int) -> list[Action]:
        """Return what a user's explicit reshard takes."""
        return self._free(unit)

    def recover(self) -> list[Action]:
        """Return what puts a backward right that was broken off by an exception."""
        return self._abandon() if self._in_backward else []

    def reset(self) -> list[Action]:
        """Forget the running iteration: free every unit, drop every unreduced gradient."""
        actions = self._abandon()
        for unit, state in enumerate(self._units):
            state.owes_reduce = False
            actions += self._free(unit)
        return actions

    def _after_recompute(self, unit: int, awaits_backward: bool) -> list[Action]:
        state = self._units[unit]
        if awaits_backward:
            if not state.awaited and not state.finished:
                state.awaited = 1  # its first run was without gradient (reentrant checkpoint)
            return []
        return [] if self._in_backward else self._free(unit)

    def _start_over(self) -> list[Action]:
        """Begin a forward of the root: what an exception left behind is put right."""
        actions: list[Action] = []
        for unit, state in enumerate(self._units):
            if state.open_calls or state.members_done:
                actions += self._free(unit)
            state.open_calls = 0
            state.members_done.clear()
        return actions

    def _begins_round(self, unit: int, member: int | None) -> bool:
        """Whether a call of the root begins a new forward: a list's next member doesn't."""
        done = self._units[unit].members_done
        return not done or member is None or member in done

    def _abandon(self) -> list[Action]:
        actions: list[Action] = []
        for unit, state in enumerate(self._units):
            if state.in_backward or state.awaited or state.phase is not Phase.SHARDED:
                actions += self._free(unit)
            if state.in_backward or state.awaited:
                actions.append(Discard(unit))
        actions.append(Drain(keep=False))
        self._forget_backward()
        return actions

    def _forget_backward(self) -> None:
        for state in self._units:
            state.awaited = 0
            state.in_backward = False
            state.finished = False
        self._order.clear()
        self._in_backward = False

    def _start(self, unit: int) -> list[Action]:
        state = self._units[unit]
        if state.phase is not Phase.SHARDED or self.settings[unit].empty:
            return []
        state.phase = Phase.GATHERING
        return [Gather(unit)]

    def _need(self, unit: int) -> list[Action]:
        actions = self._start(unit)
        state = self._units[unit]
        if state.phase is Phase.GATHERING:
            state.phase = Phase.FULL
            actions.append(Await(unit))
        return actions

    def _free(self, unit: int) -> list[Action]:
        state = self._units[unit]
        if state.phase is Phase.SHARDED:
            return []
        actions: list[Action] = [Await(unit)] if state.phase is Phase.GATHERING else []
        state.phase = Phase.SHARDED
        return [*actions, Free(unit)]

    def _free_after_forward(self, unit: int) -> list[Action]:
        keeps = not self.settings[unit].reshard_after_forward
        if keeps and self._units[unit].awaited:
            return []
        return self._free(unit)

    def _free_strays(self) -> list[Action]:
        """Free what the forward gathered and nothing will use: half-run lists, prefetches."""
        actions: list[Action] = []
        for unit, state in enumerate(self._units):
            keeps = not self.settings[unit].reshard_after_forward
            if unit != self._root and not (keeps and state.awaited):
                actions += self._free(unit)
        return actions

    def _finish(self, unit: int) -> list[Action]:
        state = self._units[unit]
        settings = self.settings[unit]
        state.in_backward = False
        state.finished = True
        actions = self._free(unit) if settings.reshard_after_backward else []
        if settings.trainable and not settings.empty:
            state.owes_reduce = not settings.sync
            actions.append(Reduce(unit) if settings.sync else Accumulate(unit))
        return actions

    def _next_in_backward(self, unit: int) -> tuple[int, ...]:
        """Return the units to gather ahead, and note that this one's turn has come."""
        if unit in self._order:
            while self._order.pop() != unit:
                pass
        chosen = self.settings[unit].backward_prefetch
        if chosen is not None:
            return chosen
        return tuple(self._order[-1:])
