"""Optimizer state by name, in one process."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hp_checkpoint
from hp_checkpoint import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from pathlib import Path

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 3], ids=["fresh", "stepped"])
def test_resume_equals_the_uninterrupted_run_bitwise(
    tmp_path: Path, name: str, num_steps: int
) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for i in range(3):
        step(model, optimizer, i)
    hp_checkpoint.save(state_of(model, optimizer), tmp_path)
    step(model, optimizer, 9)

    resumed = net()
    other = OPTIMIZERS[name](resumed.parameters())
    for i in range(num_steps):
        step(resumed, other, 100 + i)
    state = state_of(resumed, other)
    report = hp_checkpoint.load(state, tmp_path)
    load_optimizer_state(resumed, other, state["optimizer"])
    step(resumed, other, 9)

    assert report == hp_checkpoint.LoadReport((), (), ())
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_reading_changes_nothing(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()

    hp_checkpoint.save(state_of(model, optimizer), tmp_path)

    assert str((model.state_dict(), optimizer.state_dict())) == str(before)
    assert len(optimizer.state) == 0
    assert torch.equal(torch.get_rng_state(), generator)


def test_state_is_keyed_by_name_in_the_groups_order() -> None:
    model = net()
    groups = [{"params": model[2].parameters(), "lr": 1.0}, {"params": model[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=2.0)

    state: Any = optimizer_state(model, optimizer)

    assert [group["params"] for group in state["param_groups"]] == [
        ["2.weight", "2.bias"],
        ["0.weight", "0.bias"],
    ]
    assert [group["lr"] for group in state["param_groups"]] == [1.0, 2.0]


def test_parameters_in_another_order_get_their_own_state(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model[0].parameters())
    step(model, optimizer, 0)
    hp_checkpoint.save({"o": optimizer_state(model, optimizer)}, tmp_path)
    other = torch.optim.Adam([model[0].bias, model[0].weight])
    state: dict[str, Any] = {"o": optimizer_state(model, other)}

    hp_checkpoint.load(state, tmp_path)
    load_optimizer_state(model, other, state["o"])

    for parameter in model[0].parameters():
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_options_of_groups_are_restored(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    step(model, optimizer, 0)
    scheduler.step()
    hp_checkpoint.save({"o": optimizer_state(model, optimizer)}, tmp_path)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    state: dict[str, Any] = {"o": optimizer_state(model, other)}

    hp_checkpoint.load(state, tmp_path)
    load_optimizer_state(model, other, state["o"])

    assert other.param_groups[0]["lr"] == pytest.approx(0.09)
    assert other.param_groups[0]["initial_lr"] == 0.1


def test_parameter_that_is_not_the_models_is_refused() -> None:
    stranger = nn.Parameter(torch.zeros(7))

    with pytest.raises(hp_checkpoint.StateError, match=r"1 parameters .*shapes \[\(7,\)\]"):
        optimizer_state(net(), torch.optim.SGD([stranger], lr=0.1))


def test_other_groups_are_refused_and_change_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = optimizer_state(model, optimizer)
    state["param_groups"][0]["lr"] = 9.0
    other = torch.optim.SGD(model[0].parameters(), lr=0.1)

    with pytest.raises(hp_checkpoint.MatchError, match="1 groups of 2 parameters, the state 1 gr"):
        load_optimizer_state(model, other, state)

    assert other.param_groups[0]["lr"] == 0.1


def test_something_else_than_a_module_is_refused() -> None:
    with pytest.raises(hp_checkpoint.StateError, match="expected a module of a framework"):
        optimizer_state({}, {})
