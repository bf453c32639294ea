"""A byte-level GPT in plain torch modules; it knows nothing of ranks.

Legend: B = sequences, S = bytes per sequence, D = width, H = heads, V = 256 byte values.

Pre-norm blocks without biases: a bias in front of a normalisation or a softmax has a gradient
that is nothing but rounding, which Adam would turn into steps of full size.

Source: GPT-2 (Radford et al., 2019) with RMSNorm (Zhang and Sennrich, 2019).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyper_parallel.demo.options import VOCABULARY, ModelShape


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.mix = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Let every byte look at itself and the bytes before it; "B S D" to "B S D"."""
        heads = self.mix(x_BSD).unflatten(2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # nn.Module


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.network_norm = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Refine the residual stream; "B S D" to "B S D"."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        inner = functional.gelu(self.up(self.network_norm(x_BSD)), approximate="tanh")
        return x_BSD + self.down(inner)  # type: ignore[no-any-return]  # nn.Module


class ByteGPT(nn.Module):
    """Predicts the next byte of a text.

    Example:
        >>> model = ByteGPT(ModelShape(layers=1, width=64, context=8), seed=0)
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 256])
    """

    def __init__(self, shape: ModelShape, *, seed: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self._draw_weights(shape, torch.Generator().manual_seed(seed))

    def _draw_weights(self, shape: ModelShape, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            ends_branch = name.endswith(("attention.out.weight", "down.weight"))
            scale = 1 / math.sqrt(2 * shape.layers) if ends_branch else 1.0
            if parameter.ndim == 2:  # noqa: PLR2004 - matrices; norm weights stay 1
                nn.init.normal_(parameter, std=0.02 * scale, generator=generator)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """Return the logits of every next byte; "B S" of int64 to "B S V"."""
        places = torch.arange(bytes_BS.shape[1], device=bytes_BS.device)
        x_BSD = self.byte(bytes_BS) + self.place(places)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))  # type: ignore[no-any-return]  # nn.Module


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte of some windows from those before it.

    Args:
        model: A `ByteGPT`, sharded or not.
        windows: "B S+1", uint8.

    Returns:
        A scalar, in nats per byte.
    """
    tokens = windows.long()
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
