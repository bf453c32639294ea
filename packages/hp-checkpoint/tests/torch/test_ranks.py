"""DTensors on real processes: saved by some ranks, loaded by others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hp_checkpoint
import hp_dtensor
from hp_checkpoint import load_optimizer_state, optimizer_state
from hp_comm.testing import run_ranks
from hp_dtensor import Replicate, Shard
from hp_mesh import init_device_mesh

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"long": (7, 5), "wide": (3, 11), "thin": (2, 3), "tall": (1000, 300)}


def full_of(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) * 31 + SHAPES[name][0])
    return torch.randn(SHAPES[name], generator=generator)


def sharded(full: torch.Tensor, world_size: int, *placements: object) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    return hp_dtensor.distribute_tensor(full, mesh, placements)


def state_of(world_size: int, dim: int, *, zero: bool = False) -> dict[str, Any]:
    fulls = {name: full_of(name) * (0 if zero else 1) for name in SHAPES}
    return {
        "model": {name: sharded(full, world_size, Shard(dim)) for name, full in fulls.items()},
        "replicated": sharded(fulls["wide"], world_size, Replicate()),
        "half": sharded(fulls["long"].to(torch.bfloat16), world_size, Shard(1 - dim)),
        "plain": [fulls["thin"].clone(), {"epoch": -1 if zero else 5}],
    }


def save_ranks(rank: int, world_size: int, path: str, dim: int) -> None:
    hp_checkpoint.save(state_of(world_size, dim), path)


def load_ranks(rank: int, world_size: int, path: str, dim: int) -> tuple[bool, Any]:
    state = state_of(world_size, dim, zero=True)
    report = hp_checkpoint.load(state, path)
    expected = state_of(world_size, dim)
    pairs = [
        *((state["model"][name], expected["model"][name]) for name in SHAPES),
        (state["replicated"], expected["replicated"]),
        (state["half"], expected["half"]),
    ]
    same = all(torch.equal(hp_dtensor.local_of(a), hp_dtensor.local_of(b)) for a, b in pairs)
    same &= torch.equal(state["plain"][0], expected["plain"][0])
    return same and state["plain"][1] == {"epoch": 5}, (report.missing, report.unexpected)


CASES = [(1, 3, 0, 1), (2, 3, 0, 0), (3, 2, 1, 0), (4, 1, 0, 1), (2, 4, 1, 1), (3, 3, 0, 1)]


@pytest.mark.parametrize(("save_size", "load_size", "save_dim", "load_dim"), CASES)
def test_dtensors_load_on_another_number_of_ranks(
    tmp_path: Path, save_size: int, load_size: int, save_dim: int, load_dim: int
) -> None:
    path = str(tmp_path / "step")
    run_ranks(save_ranks, save_size, path, save_dim)

    found = run_ranks(load_ranks, load_size, path, load_dim)

    assert found == [(True, ((), ()))] * load_size
    full: Any = hp_checkpoint.load_full(path)
    for name in SHAPES:
        assert torch.equal(full["model"][name], full_of(name))
    assert hp_checkpoint.verify(path) == []


def save_hybrid(rank: int, world_size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    grid = {
        "hybrid": (Replicate(), Shard(0)),
        "grid": (Shard(0), Shard(1)),
        "nested": (Shard(0), Shard(0)),
        "whole": (Replicate(), Replicate()),
    }
    full = full_of("tall")
    state = {
        name: hp_dtensor.distribute_tensor(full, mesh, placements)
        for name, placements in grid.items()
    }
    hp_checkpoint.save(state, path)


def test_dtensors_on_two_axes_are_written_once(tmp_path: Path) -> None:
    path = str(tmp_path / "step")

    run_ranks(save_hybrid, 4, path)

    full: Any = hp_checkpoint.load_full(path)
    assert all(torch.equal(full[name], full_of("tall")) for name in full)
    files = hp_checkpoint.read_metadata(path).files
    sizes = [file.num_bytes - file.header_bytes for file in files.values()]
    assert sum(sizes) == 4 * full_of("tall").nbytes
    assert max(sizes) < 1.6 * sum(sizes) / 4


class Net(nn.Module):
    """Parameters of uneven shapes; one never gets a gradient."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        for name in SHAPES:
            setattr(self, name, nn.Parameter(sharded(full_of(name), world_size, Shard(0))))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, world_size: int, seed: int) -> None:
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name == "thin":
            continue
        generator = torch.Generator().manual_seed(seed * 100 + index)
        full = torch.randn(tuple(parameter.shape), generator=generator)
        parameter.grad = sharded(full, world_size, Shard(0))
    optimizer.step()


def make(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(world_size)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def whole(model: nn.Module) -> list[list[float]]:
    found = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return [one.detach().flatten()[:50].tolist() for one in found]


def train(rank: int, world_size: int, path: str) -> list[list[float]]:
    model, optimizer = make(world_size)
    for seed in range(3):
        step(model, optimizer, world_size, seed)
    state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
    hp_checkpoint.save(state, path)
    for seed in range(3, 5):
        step(model, optimizer, world_size, seed)
    return whole(model)


def resume(rank: int, world_size: int, path: str) -> list[list[float]]:
    model, optimizer = make(world_size)
    parameters = list(model.parameters())
    state: Any = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
    report = hp_checkpoint.load(state, path)
    load_optimizer_state(model, optimizer, state["optimizer"])
    assert report == hp_checkpoint.LoadReport((), (), ())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.thin not in optimizer.state
    for seed in range(3, 5):
        step(model, optimizer, world_size, seed)
    return whole(model)


@pytest.mark.parametrize(("save_size", "load_size"), [(2, 3), (3, 1), (1, 2), (2, 2)])
def test_adamw_resumed_on_another_number_of_ranks_goes_on_bitwise(
    tmp_path: Path, save_size: int, load_size: int
) -> None:
    path = str(tmp_path / "step")

    expected = run_ranks(train, save_size, path)[0]
    found = run_ranks(resume, load_size, path)

    assert found == [expected] * load_size


def per_rank(rank: int, world_size: int, path: str) -> list[float]:
    torch.manual_seed(rank)
    torch.rand(rank + 1)
    hp_checkpoint.save({"rng": torch.get_rng_state(), "rank": rank}, path)
    expected = torch.rand(2)
    torch.manual_seed(99)
    state: Any = {"rng": torch.get_rng_state(), "rank": None}
    hp_checkpoint.load(state, path)
    torch.set_rng_state(state["rng"])
    assert state["rank"] == rank
    assert torch.equal(torch.rand(2), expected)
    return expected.tolist()


def test_random_state_of_each_rank_comes_back_to_it(tmp_path: Path) -> None:
    found = run_ranks(per_rank, 2, str(tmp_path / "step"))

    assert found[0] != found[1]


def misfit(rank: int, world_size: int, path: str) -> tuple[str, bool]:
    state = state_of(world_size, 0, zero=True)
    if rank == 1:
        state["plain"][0] = torch.zeros(9)
    try:
        hp_checkpoint.load(state, path)
    except hp_checkpoint.MatchError as error:
        locals_of = [hp_dtensor.local_of(one) for one in state["model"].values()]
        return str(error), not any(bool(local.any()) for local in locals_of)
    return "no error", False


def test_load_misfit_on_one_rank_raises_on_all_and_changes_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    run_ranks(save_ranks, 2, path, 0)

    found = run_ranks(misfit, 2, path)

    assert found[0] == found[1]
    assert found[0][1]
    assert "rank 1: " in found[0][0]
    assert "plain/[0]: wanted a float32 tensor of shape (9,)" in found[0][0]


def damaged(rank: int, world_size: int, path: str) -> tuple[str, bool]:
    state = state_of(world_size, 0, zero=True)
    try:
        hp_checkpoint.load(state, path)
    except hp_checkpoint.DamageError as error:
        locals_of = [hp_dtensor.local_of(one) for one in state["model"].values()]
        return str(error), not any(bool(local.any()) for local in locals_of)
    return "no error", False


def test_load_of_a_block_that_one_rank_needs_raises_on_all(tmp_path: Path) -> None:
    path = tmp_path / "step"
    run_ranks(save_ranks, 2, str(path), 0)
    tall = next(e for e in hp_checkpoint.read_metadata(path).leaves if e.name == "model/tall")
    assert isinstance(tall, hp_checkpoint.TensorEntry)
    piece = tall.pieces[1]
    content = bytearray((path / piece.file).read_bytes())
    content[piece.end - 1] ^= 1
    (path / piece.file).write_bytes(content)

    found = run_ranks(damaged, 2, str(path))

    assert found[0] == found[1]
    assert found[0][1]
    text = f"{piece.file}, bytes {piece.begin} to {piece.end} (model/tall)"
    assert text in found[0][0]


def refuse_partial(rank: int, world_size: int, path: str) -> str:
    mesh = init_device_mesh("cpu", (world_size,)).to_torch()
    partial = DTensor.from_local(torch.ones(3), mesh, [torch.distributed.tensor.Partial()])
    try:
        hp_checkpoint.save({"a": {"sum": partial}}, path)
    except hp_checkpoint.StateError as error:
        return str(error)
    return "no error"


def test_save_of_a_partial_sum_is_refused_by_name(tmp_path: Path) -> None:
    found = run_ranks(refuse_partial, 2, str(tmp_path / "step"))

    assert "a/sum: a DTensor's placements don't say which part each rank holds" in found[0]
    assert list(tmp_path.iterdir()) == []
