"""The torch adapter: turns module and autograd hooks into events, and binds tensors."""

from hp_fully_shard._torch.api import fully_shard
from hp_fully_shard._torch.module import TorchHSDPModule

__all__ = ["TorchHSDPModule", "fully_shard"]
