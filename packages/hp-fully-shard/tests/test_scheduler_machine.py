"""The scheduler under any order of events: a model of memory and gradients checks each action."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hp_fully_shard.actions import (
    Accumulate,
    Await,
    Discard,
    Drain,
    Free,
    Gather,
    QueueEnd,
    Reduce,
)
from hp_fully_shard.scheduler import Scheduler, UnitSettings


class Unit:
    """What a real unit would hold: memory, unreduced gradients, accumulators."""

    def __init__(self) -> None:
        self.memory = "sharded"
        self.grads = 0
        self.accumulated = 0
        self.reduced = 0
        self.produced = 0


def unit_settings() -> st.SearchStrategy[UnitSettings]:
    """Draw the settings of one unit."""
    return st.builds(
        UnitSettings,
        trainable=st.booleans(),
        empty=st.just(False),
        reshard_after_forward=st.booleans(),
        reshard_after_backward=st.booleans(),
    )


class Training(RuleBasedStateMachine):
    """Runs forwards, backwards, recompute and exceptions over a tree of units."""

    @initialize(settings=st.lists(unit_settings(), min_size=1, max_size=5))
    def make_tree(self, settings: list[UnitSettings]) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings, root=0)
        self.units = [Unit() for _ in settings]
        self.graphs: list[list[int]] = []
        self.queued = 0

    def perform(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, QueueEnd):
                self.queued += 1
            elif not isinstance(action, Drain):
                self._perform(action, self.units[action.unit])

    def _perform(self, action: object, unit: Unit) -> None:
        if isinstance(action, Gather):
            assert unit.memory == "sharded"
            unit.memory = "gathering"
        elif isinstance(action, Await):
            assert unit.memory == "gathering"
            unit.memory = "full"
        elif isinstance(action, Free):
            assert unit.memory == "full"
            unit.memory = "sharded"
        elif isinstance(action, Reduce):
            unit.reduced += unit.grads + unit.accumulated
            unit.grads = unit.accumulated = 0
        elif isinstance(action, Accumulate):
            unit.accumulated += unit.grads
            unit.grads = 0
        elif isinstance(action, Discard):
            unit.produced -= unit.grads
            unit.grads = 0

    def call(self, number: int, grad: bool, inside: bool = False) -> None:
        self.perform(self.scheduler.before_forward(number, inside_backward=inside))
        assert self.units[number].memory == "full", "a unit computes only while it is full"
        actions = self.scheduler.after_forward(number, awaits_backward=grad, inside_backward=inside)
        self.perform(actions)

    @rule(data=st.data(), grad=st.booleans())
    def forward(self, data: st.DataObject, grad: bool) -> None:
        calls = data.draw(st.lists(st.integers(0, len(self.units) - 1), max_size=6))
        inner = [number for number in calls if number != 0]
        self.perform(self.scheduler.before_forward(0))
        for number in inner:
            self.call(number, grad)
            assert self.units[0].memory == "full", "the root is full while its forward runs"
        self.perform(self.scheduler.after_forward(0, awaits_backward=grad))
        if grad:
            self.graphs.append([*inner, 0])

    @rule(data=st.data())
    def forward_that_raises(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.units) - 1))
        self.perform(self.scheduler.before_forward(0))
        self.perform(self.scheduler.before_forward(number))
        self.graphs.clear()

    @rule(data=st.data(), sync=st.booleans())
    def backward(self, data: st.DataObject, sync: bool) -> None:
        if not self.graphs:
            return
        for settings in self.settings:
            settings.sync = sync
        graph = self.graphs.pop(0)
        self.queued = 0
        for number in reversed(graph):
            self._backward_of_one_call(data, number)
        assert self.queued == 1, "the end is asked for once per backward"
        leftover = [number for number, unit in enumerate(self.units) if unit.grads]
        self.perform(self.scheduler.backward_end(leftover))
        self._check_after_backward(sync)

    def _backward_of_one_call(self, data: st.DataObject, number: int) -> None:
        self.perform(self.scheduler.before_backward(number))
        assert self.units[number].memory == "full", "backward computes on full parameters"
        if data.draw(st.booleans(), label="recompute"):
            self.call(number, grad=True, inside=True)
            assert self.units[number].memory == "full", "recompute frees nothing"
        if self.settings[number].trainable:
            self.units[number].grads += 1
            self.units[number].produced += 1
        if data.draw(st.booleans(), label="inputs need a gradient"):
            self.perform(self.scheduler.after_backward(number))

    def _check_after_backward(self, sync: bool) -> None:
        for unit, settings in zip(self.units, self.settings, strict=True):
            assert unit.grads == 0, "after the end no gradient is left unreduced"
            if sync:
                assert unit.accumulated == 0
                assert unit.reduced == unit.produced
            if settings.reshard_after_backward:
                assert unit.memory == "sharded"

    @rule(data=st.data())
    def backward_that_raises(self, data: st.DataObject) -> None:
        if not self.graphs:
            return
        graph = self.graphs.pop()
        steps = data.draw(st.integers(1, len(graph)))
        for number in list(reversed(graph))[:steps]:
            self._backward_of_one_call(data, number)
        self.graphs.clear()
        self.perform(self.scheduler.reset())
        for unit in self.units:
            assert unit.memory == "sharded"
            unit.produced -= unit.accumulated
            unit.accumulated = 0

    @invariant()
    def memory_is_what_the_scheduler_thinks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for number, unit in enumerate(self.units):
            assert unit.memory == self.scheduler.phase(number).value


TestTraining = Training.TestCase
TestTraining.settings = hypothesis_settings(
    max_examples=200, stateful_step_count=12, deadline=None, derandomize=True
)
