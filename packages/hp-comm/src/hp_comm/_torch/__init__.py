"""The torch adapter: tensor operations, c10d stores and groups, the choice of transport."""

from hp_comm._torch.choose import communicator
from hp_comm._torch.ops import TorchOps

__all__ = ["TorchOps", "communicator"]
