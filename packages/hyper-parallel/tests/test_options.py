"""What the demo may be asked for, and the defaults of the second phase."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.demo.options import DemoOptions, ModelShape, default_resume_ranks
from hyper_parallel.demo.run import plan_phases
from hyper_parallel.errors import DemoError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 0}, "--ranks 0 asks for no rank"),
        ({"ranks": -2}, "--ranks -2 asks for no rank"),
        ({"ranks": 5}, "--ranks 5 can't share a batch of 12 .* 1, 2, 3, 4, 6, 12"),
        ({"resume_ranks": 7}, "--resume-ranks 7 can't share"),
        ({"resume_ranks": -1}, "--resume-ranks -1 asks for no rank"),
        ({"batch": 0}, "--batch 0 is too few"),
        ({"steps": 1}, "--steps 1 is too few"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 isn't above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate nan isn't above 0"),
        ({"transport": "pigeon"}, "--transport 'pigeon' isn't known: pass one of auto, shm, gloo"),
    ],
    ids=str,
)
def test_options_refuse_what_cannot_be_done(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        DemoOptions(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "--layers 0 is too few"),
        ({"width": 96}, "--width 96 isn't a multiple of 64"),
        ({"context": 0}, "--context 0 is too few"),
    ],
    ids=str,
)
def test_shape_refuses_what_cannot_be_built(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        ModelShape(**wrong)


@pytest.mark.parametrize(
    ("ranks", "num_cpus", "expected"),
    [(1, 1, 2), (2, 2, 3), (3, 2, 1), (3, 8, 4), (4, 8, 1), (5, 8, 6), (12, 64, 1)],
)
def test_resume_ranks_are_one_more_where_sensible_else_one(
    ranks: int, num_cpus: int, expected: int
) -> None:
    assert default_resume_ranks(ranks, 12, num_cpus) == expected


def test_phases_cover_all_steps_once() -> None:
    first, second = plan_phases(DemoOptions(steps=7, ranks=1, resume_ranks=2))

    assert (first.first_step, first.last_step) == (0, 3)
    assert (second.first_step, second.last_step) == (3, 7)
    assert (first.ranks, second.ranks) == (1, 2)
    assert (first.resumed, second.resumed) == (False, True)
