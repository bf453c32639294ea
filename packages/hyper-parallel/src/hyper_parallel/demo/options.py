"""What a user may ask of the demo; everything is checked before a rank is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from hyper_parallel.errors import DemoError

TRANSPORTS = ("auto", "shm", "gloo")
VOCABULARY = 256
HEAD_SIZE = 64


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of the byte-level GPT; the defaults make 5.1 million parameters.

    Example:
        >>> ModelShape().num_heads
        5
        >>> ModelShape(width=100)
        Traceback (most recent call last):
        ...
        hyper_parallel.errors.DemoError: --width 100 isn't a multiple of 64, the size of one \
attention head: pass one that is.
    """

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 320
    """Features per byte, a multiple of 64."""
    context: int = 64
    """Bytes per sequence."""

    def __post_init__(self) -> None:
        _require_positive("--layers", self.layers)
        _require_positive("--width", self.width)
        _require_positive("--context", self.context)
        if self.width % HEAD_SIZE:
            raise DemoError(
                f"--width {self.width} isn't a multiple of {HEAD_SIZE}, the size of one "
                f"attention head: pass one that is."
            )

    @property
    def num_heads(self) -> int:
        """Attention heads per block."""
        return self.width // HEAD_SIZE


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """One run of the demo.

    Example:
        >>> DemoOptions(ranks=2).resume_ranks
        3
        >>> DemoOptions(ranks=0)
        Traceback (most recent call last):
        ...
        hyper_parallel.errors.DemoError: --ranks 0 asks for no rank at all: pass 1 or more.
    """

    out: Path = Path("demo-out")
    """Folder for the report, the picture, the checkpoint and the logs."""
    text: Path | None = None
    """Folder whose text is learnt; None for Python's standard library."""
    ranks: int = 2
    """Ranks of the first phase."""
    resume_ranks: int = 0
    """Ranks of the second phase; 0 picks `default_resume_ranks`."""
    steps: int = 600
    """Optimizer steps of both phases together."""
    batch: int = 12
    """Sequences per step over all ranks; 12 can be divided by 1, 2, 3, 4 and 6."""
    learning_rate: float = 1e-3
    """The highest learning rate, reached after the warm-up."""
    seed: int = 0
    """Decides the initial weights, the order of the text and the sample."""
    transport: str = "auto"
    """How bytes move between ranks: one of `TRANSPORTS`."""
    model: ModelShape = field(default_factory=ModelShape)
    """The sizes of the model."""

    def __post_init__(self) -> None:
        _require_positive("--batch", self.batch)
        _require_ranks("--ranks", self.ranks, self.batch)
        if self.resume_ranks == 0:
            picked = default_resume_ranks(self.ranks, self.batch, os.cpu_count() or 1)
            object.__setattr__(self, "resume_ranks", picked)
        _require_ranks("--resume-ranks", self.resume_ranks, self.batch)
        if self.first_phase_steps < 1:
            raise DemoError(f"--steps {self.steps} is too few: each of the 2 phases needs a step.")
        if not self.learning_rate > 0:
            raise DemoError(f"--learning-rate {self.learning_rate} isn't above 0.")
        if self.transport not in TRANSPORTS:
            raise DemoError(
                f"--transport {self.transport!r} isn't known: pass one of {', '.join(TRANSPORTS)}."
            )

    @property
    def first_phase_steps(self) -> int:
        """Steps before the checkpoint that the second phase starts from."""
        return self.steps // 2


def default_resume_ranks(ranks: int, batch: int, num_cpus: int) -> int:
    """Return how many ranks go on after `ranks` of them ended.

    One more, where the batch can be shared by that many and the machine has the cores
    (3 are started on any machine); else a single one.

    Args:
        ranks: Ranks of the first phase.
        batch: Sequences per step over all ranks.
        num_cpus: Cores of this machine.

    Returns:
        Ranks of the second phase.

    Example:
        >>> default_resume_ranks(2, 12, num_cpus=2), default_resume_ranks(3, 12, num_cpus=2)
        (3, 1)
    """
    more = ranks + 1
    return more if batch % more == 0 and more <= max(3, num_cpus) else 1


def _require_positive(option: str, value: int) -> None:
    if value < 1:
        raise DemoError(f"{option} {value} is too few: pass 1 or more.")


def _require_ranks(option: str, ranks: int, batch: int) -> None:
    if ranks < 1:
        raise DemoError(f"{option} {ranks} asks for no rank at all: pass 1 or more.")
    if batch % ranks:
        fits = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        raise DemoError(
            f"{option} {ranks} can't share a batch of {batch} sequences evenly: "
            f"pass one of {', '.join(fits)}, or another --batch."
        )
