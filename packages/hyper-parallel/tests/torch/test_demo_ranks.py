"""The same seed gives the same losses on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_comm.testing import run_ranks
from hyper_parallel.demo.job import OutFiles, PhaseJob
from hyper_parallel.demo.options import DemoOptions, ModelShape
from hyper_parallel.demo.text import read_stdlib

STEPS = 12


def _train(rank: int, world_size: int, out: str, first_step: int, last_step: int) -> list[float]:
    from hyper_parallel._torch.demo_train import train_in_group  # noqa: PLC0415 - in the rank

    options = DemoOptions(
        out=Path(out), steps=STEPS, model=ModelShape(layers=2, width=64, context=32)
    )
    job = PhaseJob(
        number=1,
        ranks=world_size,
        threads=1,
        first_step=first_step,
        last_step=last_step,
        options=options,
    )
    result = train_in_group(job)
    return [*result.losses, *result.validation_losses]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> OutFiles:
    files = OutFiles(tmp_path_factory.mktemp("texts"))
    corpus = read_stdlib()
    files.train_text.write_bytes(corpus.train)
    files.validation_text.write_bytes(corpus.validation)
    return files


def _losses(texts: OutFiles, world_size: int, first_step: int, last_step: int) -> list[float]:
    by_rank = run_ranks(_train, world_size, str(texts.out), first_step, last_step)
    assert all(losses == by_rank[0] for losses in by_rank)
    return by_rank[0]


@pytest.fixture(scope="module")
def losses_of_one_rank(texts: OutFiles) -> list[float]:
    return _losses(texts, 1, 0, STEPS)


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_on_many_ranks_equal_those_on_one(
    texts: OutFiles, losses_of_one_rank: list[float], world_size: int
) -> None:
    losses = _losses(texts, world_size, 0, STEPS)

    assert losses_of_one_rank[-1] < losses_of_one_rank[0] - 0.3  # it does learn
    assert losses == pytest.approx(losses_of_one_rank, abs=1e-4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_resumed_losses_equal_those_without_a_stop(
    texts: OutFiles, losses_of_one_rank: list[float], world_size: int
) -> None:
    _losses(texts, 2, 0, 5)
    resumed = _losses(texts, world_size, 5, STEPS)

    training, final = resumed[: STEPS - 5], resumed[-1]
    assert training == pytest.approx(losses_of_one_rank[5:STEPS], abs=1e-4)
    assert final == pytest.approx(losses_of_one_rank[-1], abs=1e-4)
