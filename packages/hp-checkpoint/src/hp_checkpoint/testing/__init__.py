"""Arrays without a framework, and death at a chosen moment: what tests of saving need."""

from hp_checkpoint.testing.kill import KillSwitch
from hp_checkpoint.testing.numpy_arrays import BoxArray, NumpyArrays, plain, replica, shard

__all__ = ["BoxArray", "KillSwitch", "NumpyArrays", "plain", "replica", "shard"]
