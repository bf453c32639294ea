"""The README's example, grown to a script that runs: train, save, and go on from what was saved.

    torchrun --nproc-per-node 2 examples/train_tiny.py /tmp/tiny
    torchrun --nproc-per-node 3 examples/train_tiny.py /tmp/tiny

The second command goes on where the first one ended, on another number of ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from hyper_parallel import fully_shard, init_device_mesh, load, save

STEPS = 20


def build_model() -> nn.Sequential:
    """Return a model that is equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def main(checkpoint: Path) -> None:
    """Learn to turn vectors around, from the checkpoint on where there is one."""
    distributed.init_process_group("gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()

    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))
    model = build_model()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)  # after fully_shard

    state: dict[str, Any] = {"model": model.state_dict(), "step": 0}
    if checkpoint.exists():
        load(state, checkpoint)
    for step in range(state["step"], state["step"] + STEPS):
        batch = torch.randn(12, 64, generator=torch.Generator().manual_seed(step))
        mine = batch.tensor_split(num_ranks)[rank]
        loss = (model(mine) + mine).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    save({"model": model.state_dict(), "step": state["step"] + STEPS}, checkpoint)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
