"""What is compared by step_time.py: one model, trained in four ways.

    plain    no communication, every rank updates its share of the parameters: the limit
    ddp      torch's DistributedDataParallel
    fsdp2    torch's fully_shard
    ours     hyper_parallel's fully_shard

All begin with the same weights and see the same data in fp32 with fused AdamW, so the losses of
ddp, fsdp2 and ours agree. `plain` exchanges no gradients: only its first loss can agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel

MODES = ("plain", "ddp", "fsdp2", "ours")
LEARNING_RATE = 1e-4

Step = Callable[[Tensor], Tensor]
"""Trains on "B S+1" token numbers and returns this rank's loss, in nats per token."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the model and of one rank's part of a step."""

    layers: int
    """Transformer layers."""
    width: int
    """Features per token, a multiple of 64."""
    sequences: int
    """Sequences per rank and step."""
    length: int
    """Tokens per sequence."""
    vocabulary: int = 2048
    """Number of different tokens."""


CONFIGS = {
    "A": Config(layers=8, width=512, sequences=2, length=128),
    "B": Config(layers=4, width=1024, sequences=1, length=32),
    "tiny": Config(layers=2, width=64, sequences=2, length=16),  # to see that all runs
}


class Model(nn.Module):
    """A decoder of torch's own transformer layers."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width,
                nhead=config.width // 64,
                dim_feedforward=4 * config.width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every next token; "B S" to "B S V"."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.token(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]  # nn.Module


def build_step(mode: str, config: Config) -> Step:
    """Return the training step of one mode; every rank builds the modes in the same order.

    Args:
        mode: One of `MODES`.
        config: Sizes.

    Returns:
        The step.
    """
    torch.manual_seed(0)
    network = Model(config)
    model: nn.Module = network
    if mode == "plain":
        return _PlainStep(model)
    if mode == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard = torch_fully_shard if mode == "fsdp2" else hyper_parallel.fully_shard
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("shard",))
        for layer in network.layers:
            shard(layer, mesh=mesh)
        shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = _backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


class _PlainStep:
    """Forward and backward of the whole model, then an update of this rank's share of it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._shares = [nn.Parameter(self._mine(p.data)) for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._shares, lr=LEARNING_RATE, fused=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        loss = _backward(self._model, tokens)
        for parameter, share in zip(self._parameters, self._shares, strict=True):
            assert parameter.grad is not None, "every parameter of the model is used"
            share.grad = self._mine(parameter.grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._model.zero_grad()
        return loss

    def _mine(self, full: Tensor) -> Tensor:
        num_shares = distributed.get_world_size()
        return full.view(-1).tensor_split(num_shares)[distributed.get_rank()]


def _backward(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.detach()
