"""Training that is saved on some ranks and goes on on others ends where an unsharded one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from hp_checkpoint import load, save
from hp_comm.testing import run_ranks
from hyper_parallel import fully_shard

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 5
SAVED_AFTER = 2
ROWS = 12  # of the global batch; divisible by 1, 2, 3 and 4 ranks


def _model() -> nn.Sequential:
    """Return a model with sizes that no number of ranks divides."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11), nn.Linear(11, 1)).double()


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world_size: int
) -> None:
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    for step in steps:
        model(_batch(step)[rows]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    for layer in [*model, model]:
        fully_shard(layer)
    return model, _optimizer(model)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return parameters and momentum; zeros where the optimizer has none yet."""
    momentum = {
        name: optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
        for name, parameter in model.named_parameters()
    }
    return {"model": model.state_dict(), "momentum": momentum, "step": 0}


def train_and_save(rank: int, world_size: int, folder: str) -> None:
    """Train the first steps and save; runs on every rank."""
    model, optimizer = _sharded()
    _train(model, optimizer, range(SAVED_AFTER), rank, world_size)
    save(_state(model, optimizer) | {"step": SAVED_AFTER}, folder)


def resume(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """Load and train the other steps; runs on every rank; returns the full weights."""
    model, optimizer = _sharded()
    for parameter in model.parameters():  # what is not loaded must show
        nn.init.constant_(parameter.to_local(), torch.nan)
    state = _state(model, optimizer)
    load(state, folder)
    _train(model, optimizer, range(int(state["step"]), NUM_STEPS), rank, world_size)
    named = model.state_dict().items()
    return {name: value.full_tensor().flatten().tolist() for name, value in named}


@pytest.mark.parametrize(
    ("saved_on", "resumed_on"), [(2, 3), (3, 1), (1, 4)], ids=lambda ranks: f"{ranks}"
)
def test_resumed_training_equals_unsharded_training(
    tmp_path: Path, saved_on: int, resumed_on: int
) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(train_and_save, saved_on, folder)
    resumed = run_ranks(resume, resumed_on, folder)

    model = _model()
    _train(model, _optimizer(model), range(NUM_STEPS), 0, 1)
    wanted = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    for weights in resumed:
        assert weights.keys() == wanted.keys()
        for name, values in wanted.items():
            assert weights[name] == pytest.approx(values, abs=1e-10), name
