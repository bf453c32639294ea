"""hp_fully_shard: train a model whose parameters are spread over ranks (FSDP / ZeRO-3)."""

from hp_fully_shard._version import __version__
from hp_fully_shard.api import fully_shard
from hp_fully_shard.errors import FullyShardError, ShardedStateError, UnsupportedError
from hp_fully_shard.module import HSDPModule, UnshardHandle
from hp_fully_shard.policy import MixedPrecisionPolicy

__all__ = [
    "FullyShardError",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "ShardedStateError",
    "UnshardHandle",
    "UnsupportedError",
    "__version__",
    "fully_shard",
]
