"""The scheduler's transitions, one table row a test. Expectations are written by hand."""

import pytest

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
from hp_fully_shard.scheduler import Phase, Scheduler, UnitSettings


def tree(*units: UnitSettings) -> Scheduler:
    """Return a scheduler over a root (unit 0, which stays full) and these units."""
    root = UnitSettings(reshard_after_forward=False)
    return Scheduler([root, *units], root=0)


def run_forward(scheduler: Scheduler, *order: int, grad: bool = True) -> list[object]:
    """Run the root's forward with these units called one after the other inside."""
    actions: list[object] = list(scheduler.before_forward(0))
    for unit in order:
        actions += scheduler.before_forward(unit)
        actions += scheduler.after_forward(unit, awaits_backward=grad)
    return actions + scheduler.after_forward(0, awaits_backward=grad)


def test_forward_gathers_each_unit_and_keeps_only_the_root() -> None:
    scheduler = tree(UnitSettings(), UnitSettings())
    actions = run_forward(scheduler, 1, 2)
    assert actions == [
        *(Gather(0), Await(0)),
        *(Gather(1), Await(1), Free(1)),
        *(Gather(2), Await(2), Free(2)),
    ]
    assert scheduler.phase(0) is Phase.FULL


def test_forward_without_gradient_frees_the_root_too() -> None:
    scheduler = tree(UnitSettings())
    assert run_forward(scheduler, 1, grad=False)[-1] == Free(0)


def test_backward_prefetches_the_unit_that_ran_before() -> None:
    scheduler = tree(UnitSettings(), UnitSettings())
    run_forward(scheduler, 1, 2)
    assert scheduler.before_backward(0) == [QueueEnd(), Gather(2)]
    assert scheduler.before_backward(2) == [Await(2), Gather(1)]
    assert scheduler.after_backward(2) == [Free(2), Reduce(2)]
    assert scheduler.before_backward(1) == [Await(1)]
    assert scheduler.after_backward(1) == [Free(1), Reduce(1)]
    assert scheduler.backward_end() == [Free(0), Reduce(0), Drain()]


def test_unit_whose_inputs_need_no_gradient_is_reduced_at_the_end() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1)
    scheduler.before_backward(0)
    scheduler.before_backward(1)
    assert scheduler.backward_end() == [Free(0), Reduce(0), Free(1), Reduce(1), Drain()]


def test_unit_called_twice_is_gathered_once_and_reduced_once_in_backward() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1, 1)
    scheduler.before_backward(0)
    assert Await(1) in scheduler.before_backward(1)
    assert scheduler.after_backward(1) == []
    assert scheduler.before_backward(1) == []
    assert scheduler.after_backward(1) == [Free(1), Reduce(1)]
    assert scheduler.backward_end() == [Free(0), Reduce(0), Drain()]


def test_unit_without_sync_accumulates_and_owes_a_reduction() -> None:
    settings = UnitSettings(sync=False)
    scheduler = tree(settings)
    run_forward(scheduler, 1)
    scheduler.before_backward(1)
    assert scheduler.after_backward(1) == [Free(1), Accumulate(1)]
    scheduler.backward_end()
    settings.sync = True
    run_forward(scheduler)  # unit 1 doesn't run in the synchronised micro-batch
    scheduler.before_backward(0)
    assert Reduce(1) in scheduler.backward_end()
    run_forward(scheduler)
    scheduler.before_backward(0)
    assert Reduce(1) not in scheduler.backward_end()


def test_frozen_unit_is_never_reduced() -> None:
    scheduler = tree(UnitSettings(trainable=False))
    run_forward(scheduler, 1)
    scheduler.before_backward(1)
    assert scheduler.after_backward(1) == [Free(1)]
    assert Reduce(1) not in scheduler.backward_end()


def test_empty_unit_is_neither_gathered_nor_reduced() -> None:
    scheduler = tree(UnitSettings(empty=True))
    actions = run_forward(scheduler, 1)
    assert not any(action in actions for action in (Gather(1), Await(1), Free(1)))
    scheduler.before_backward(1)
    assert scheduler.after_backward(1) == []


def test_recompute_gathers_what_it_needs_and_frees_nothing() -> None:
    scheduler = tree(UnitSettings(), UnitSettings())
    run_forward(scheduler, 1, 2)
    scheduler.before_backward(2)
    assert scheduler.before_forward(2, inside_backward=True) == []
    assert scheduler.after_forward(2, awaits_backward=True, inside_backward=True) == []
    assert scheduler.after_backward(2) == [Free(2), Reduce(2)]


def test_reentrant_recompute_is_awaited_because_its_first_run_was_not() -> None:
    scheduler = tree(UnitSettings())
    scheduler.before_forward(0)
    scheduler.before_forward(1)
    scheduler.after_forward(1, awaits_backward=False)  # under no_grad in the checkpoint
    scheduler.after_forward(0, awaits_backward=True)
    scheduler.before_backward(0)
    assert scheduler.before_forward(1, inside_backward=True) == [Gather(1), Await(1)]
    assert scheduler.after_forward(1, awaits_backward=True, inside_backward=True) == []
    assert scheduler.before_backward(1) == []
    assert scheduler.after_backward(1) == [Free(1), Reduce(1)]


def test_recompute_does_not_prefetch_the_next_unit_of_the_forward() -> None:
    scheduler = tree(UnitSettings(forward_prefetch=(2,)), UnitSettings())
    assert scheduler.before_forward(1) == [Gather(1), Await(1), Gather(2)]
    scheduler.reset()
    assert scheduler.before_forward(1, inside_backward=True) == [Gather(1), Await(1)]


def test_two_forwards_then_two_backwards_reduce_in_each_backward() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1)
    run_forward(scheduler, 1)
    for _ in range(2):
        actions = [*scheduler.before_backward(0), *scheduler.before_backward(1)]
        actions += scheduler.after_backward(1)
        actions += scheduler.backward_end()
        assert actions.count(Reduce(1)) == 1
        assert actions.count(Reduce(0)) == 1


def test_gradients_that_arrive_late_are_reduced_at_the_end() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1)
    scheduler.before_backward(1)
    assert Reduce(1) in scheduler.after_backward(1)
    assert Reduce(1) in scheduler.backward_end(leftover=[1])


def test_broken_off_backward_is_dropped_at_the_next_forward() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1)
    scheduler.before_backward(0)
    scheduler.before_backward(1)  # and then an exception in a user's hook
    assert scheduler.before_forward(0) == [
        *(Free(0), Discard(0), Free(1), Discard(1), Drain(keep=False)),
        *(Gather(0), Await(0)),
    ]
    assert not scheduler.in_backward


def test_forward_that_raised_leaves_its_units_to_be_gathered_again() -> None:
    scheduler = tree(UnitSettings())
    scheduler.before_forward(0)
    scheduler.before_forward(1)  # and then an exception in the module
    actions = scheduler.before_forward(0)
    assert actions == [Free(0), Free(1), Gather(0), Await(0)]


def test_list_unit_is_freed_after_its_last_member() -> None:
    scheduler = tree(UnitSettings(num_members=2))
    scheduler.before_forward(0)
    assert scheduler.before_forward(1) == [Gather(1), Await(1)]
    assert scheduler.after_forward(1, awaits_backward=True, member=0) == []
    assert scheduler.before_forward(1) == []
    assert scheduler.after_forward(1, awaits_backward=True, member=1) == [Free(1)]


def test_list_unit_with_a_member_that_is_not_called_is_freed_with_the_root() -> None:
    scheduler = tree(UnitSettings(num_members=2))
    scheduler.before_forward(0)
    scheduler.before_forward(1)
    scheduler.after_forward(1, awaits_backward=True, member=0)
    assert Free(1) in scheduler.after_forward(0, awaits_backward=True)
    assert scheduler.before_forward(0) == []
    assert scheduler.before_forward(1) == [Gather(1), Await(1)]


def test_unit_that_keeps_full_after_backward_is_not_gathered_again() -> None:
    scheduler = tree(UnitSettings(reshard_after_backward=False, reshard_after_forward=False))
    run_forward(scheduler, 1)
    scheduler.before_backward(1)
    assert scheduler.after_backward(1) == [Reduce(1)]
    assert Free(1) not in scheduler.backward_end()
    assert scheduler.before_forward(1) == []


def test_explicit_unshard_is_waited_for_by_the_forward() -> None:
    scheduler = tree(UnitSettings())
    assert scheduler.unshard(1, wait=False) == [Gather(1)]
    assert scheduler.before_forward(1) == [Await(1)]
    assert scheduler.reshard(1) == [Free(1)]
    assert scheduler.reshard(1) == []


def test_after_backward_without_its_beginning_does_nothing() -> None:
    scheduler = tree(UnitSettings())
    run_forward(scheduler, 1)
    assert scheduler.after_backward(1) == []


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_call_inside_another_call_of_the_same_unit_does_not_free(grad: bool) -> None:
    scheduler = tree(UnitSettings())
    scheduler.before_forward(1)
    scheduler.before_forward(1)
    assert scheduler.after_forward(1, awaits_backward=grad) == []
    assert scheduler.after_forward(1, awaits_backward=grad) == [Free(1)]
