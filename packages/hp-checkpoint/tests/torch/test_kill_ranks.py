"""SIGKILL of one rank, or of all, while two real processes save model and optimizer."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hp_checkpoint
import hp_dtensor
from hp_checkpoint import load_optimizer_state, optimizer_state
from hp_checkpoint.testing import KillSwitch
from hp_comm.testing import RankError, run_ranks
from hp_dtensor import Shard
from hp_mesh import init_device_mesh

if TYPE_CHECKING:
    from pathlib import Path

NUM_MOMENTS = {0: 18, 1: 3}  # how many changes of the file system each rank's save makes
CASES = [
    (rank, moment, victims)
    for rank, count in NUM_MOMENTS.items()
    for moment in range(1, count + 1)
    for victims in ("one", "all")
]
SAMPLE = random.Random(5).sample(CASES, 6)
STRESS = [pytest.param(*case, marks=pytest.mark.stress) for case in CASES]
NAMES = {"w": (301, 70), "b": (5,), "e": (1, 3)}


class Net(nn.Module):
    """Three uneven parameters, one of them on rank 0 only."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world_size,))
        for name, shape in NAMES.items():
            full = torch.full(shape, 0.5)
            local = hp_dtensor.distribute_tensor(full, mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(local))


def make(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(world_size)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(version)).detach()
    optimizer.step()


def trained(world_size: int, version: int) -> dict[str, Any]:
    model, optimizer = make(world_size)
    for number in range(1, version + 1):
        step(model, optimizer, number)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer_state(model, optimizer),
        "version": version,
    }


def save(rank: int, world_size: int, path: str, version: int) -> None:
    hp_checkpoint.save(trained(world_size, version), path)


def save_and_die(rank: int, world_size: int, path: str, case: tuple[int, int, str]) -> None:
    dying, moment, victims = case
    pids = [os.getpid()] * world_size
    torch.distributed.all_gather_object(pids, os.getpid())
    state = trained(world_size, 2)
    switch = KillSwitch(
        moment if rank == dying else 0, victims=[p for p in pids if p != os.getpid()]
    )
    if victims == "one":
        switch = KillSwitch(moment if rank == dying else 0)
    switch.arm()
    hp_checkpoint.save(state, path)
    time.sleep(0.2)  # the other may be about to kill this one


def newest(path: str) -> tuple[int, bool]:
    """Return the version that is there, and whether every bit is what one process computes."""
    found: Any = hp_checkpoint.load_full(path)
    torch.manual_seed(0)
    version = found["version"]
    weights = {name: torch.full(shape, 0.5) for name, shape in NAMES.items()}
    parameters = [nn.Parameter(one) for one in weights.values()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for number in range(1, version + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(number))
        optimizer.step()
    same = [
        torch.equal(found["model"][name], parameter.detach())
        and all(
            torch.equal(found["optimizer"]["state"][name][key], value)
            for key, value in optimizer.state[parameter].items()
        )
        for name, parameter in zip(NAMES, parameters, strict=True)
    ]
    return version, all(same)


def resume(rank: int, world_size: int, path: str) -> int:
    model, optimizer = make(world_size)
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer_state(model, optimizer),
        "version": 0,
    }
    hp_checkpoint.load(state, path)
    load_optimizer_state(model, optimizer, state["optimizer"])
    step(model, optimizer, state["version"] + 1)
    hp_checkpoint.save({**state, "version": state["version"] + 1}, path)
    return int(state["version"])


@pytest.mark.parametrize(("dying", "moment", "victims"), [*SAMPLE, *STRESS])
def test_killed_save_leaves_a_whole_checkpoint_that_training_resumes_from(
    tmp_path: Path, dying: int, moment: int, victims: str
) -> None:
    path = str(tmp_path / "step")
    run_ranks(save, 2, path, 1)

    with pytest.raises(RankError, match="was ended by SIGKILL"):
        run_ranks(save_and_die, 2, path, (dying, moment, victims), env={"HP_TIMEOUT_S": "2"})

    version, same = newest(path)
    assert version in {1, 2}
    assert same
    found = run_ranks(resume, 3, path)
    assert found == [version] * 3
    assert newest(path)[0] == version + 1
    assert os.listdir(tmp_path) == ["step"]
    listed = {*hp_checkpoint.read_metadata(path).files, "manifest.json"}
    assert set(os.listdir(path)) == listed


def count(rank: int, world_size: int, path: str) -> int:
    switch = KillSwitch(0)
    state = trained(world_size, 2)
    switch.arm()
    hp_checkpoint.save(state, path)
    switch.disarm()
    return len(switch.calls)


def test_moments_cover_the_whole_save(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(save, 2, path, 1)

    found = run_ranks(count, 2, path)

    assert dict(enumerate(found)) == NUM_MOMENTS
