"""The learning rate over the steps, and the number of collectives they need."""

from __future__ import annotations

import pytest

from hyper_parallel.demo.schedule import expected_collectives, learning_rate


def test_rate_climbs_for_a_tenth_then_falls() -> None:
    rates = [learning_rate(step, steps=50, peak=2.0) for step in range(50)]

    assert max(rates) == rates[4] == pytest.approx(2.0)
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.15


def test_rate_of_a_two_step_run_is_defined() -> None:
    assert learning_rate(0, steps=2, peak=1.0) == 1.0
    assert 0 < learning_rate(1, steps=2, peak=1.0) <= 1.0


def test_collectives_follow_the_units() -> None:
    # Two blocks and the root: 2 + 2 + 1 gathers and 3 reductions in each of 10 steps, and
    # 3 gathers in each of 4 validation batches.
    expected = {"all_gather": 10 * 5 + 4 * 3, "reduce_scatter": 10 * 3, "all_reduce": 14}

    assert expected_collectives(num_blocks=2, num_steps=10, num_validation_batches=4) == expected
