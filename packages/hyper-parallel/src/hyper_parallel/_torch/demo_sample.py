"""Lets a saved model write: one process, the plain model, no sharding.

The sharded checkpoint is read whole, which also shows that it needs no ranks to be of use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hp_checkpoint import load_full
from hyper_parallel._torch.demo_model import ByteGPT

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.demo.options import DemoOptions

PROMPT = b"\ndef "
TEMPERATURE = 0.7


@torch.no_grad()
def write_sample(checkpoint: Path, options: DemoOptions, num_bytes: int) -> bytes:
    """Continue a prompt with a saved model.

    Args:
        checkpoint: What the demo saved.
        options: Of the run that saved it.
        num_bytes: How many bytes to add.

    Returns:
        The prompt and what follows.
    """
    model = ByteGPT(options.model, seed=options.seed)
    weights = cast("dict[str, torch.Tensor]", load_full(checkpoint)["model"])
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([list(PROMPT)])
    for _ in range(num_bytes):
        logits = model(text[:, -options.model.context :])[0, -1]
        chances = torch.softmax(logits / TEMPERATURE, dim=0)
        following = torch.multinomial(chances, 1, generator=generator)
        text = torch.cat((text, following[None]), dim=1)
    return bytes(text[0].tolist())


def versions() -> dict[str, str]:
    """Return the version of torch.

    Example:
        >>> sorted(versions())
        ['torch']
    """
    return {"torch": torch.__version__}
