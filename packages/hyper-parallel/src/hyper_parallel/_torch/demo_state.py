"""What a checkpoint of the demo holds, and how it gets back into a model and its optimizer.

    model        the parameters
    optimizer    AdamW's moments and number of steps, by parameter name
    progress     steps done and position in the training text

Everything sharded is a DTensor, so a checkpoint of any number of ranks loads on any other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hp_checkpoint import load, load_optimizer_state, optimizer_state, save

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training has come."""

    step: int
    """Steps done."""
    position: int
    """Sequences of the training text used up."""


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
    """Write model, optimizer and progress; every rank calls this.

    Args:
        path: Folder of the checkpoint; an older one there is replaced in one moment.
        model: The sharded model.
        optimizer: Over the model's parameters.
        progress: Kept as plain numbers.
    """
    save(_state(model, optimizer, progress), path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> Progress:
    """Read model and optimizer in place; every rank calls this.

    Args:
        path: Folder of the checkpoint.
        model: The sharded model, on any number of ranks.
        optimizer: Over the model's parameters; may not have made a step yet.

    Returns:
        How far the saved training had come.
    """
    state = _state(model, optimizer, Progress(step=0, position=0))
    load(state, path)
    load_optimizer_state(model, optimizer, state["optimizer"])
    return Progress(**state["progress"])


def _state(model: nn.Module, optimizer: Optimizer, progress: Progress) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer_state(model, optimizer),
        "progress": asdict(progress),
    }
