"""PyTorch's side: tensors and DTensors as carriers and boxes, process groups as peers."""

from hp_checkpoint._torch.optimizer import load_optimizer_state, optimizer_state
from hp_checkpoint._torch.peers import peers
from hp_checkpoint._torch.tensor import arrays

__all__ = ["arrays", "load_optimizer_state", "optimizer_state", "peers"]
