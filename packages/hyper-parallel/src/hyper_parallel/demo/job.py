"""What one phase of the demo hands its ranks, and what every rank hands back.

Plain values only: they travel between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.demo.options import DemoOptions

VALIDATION_BATCHES = 20


@dataclass(frozen=True, slots=True)
class PhaseJob:
    """One phase: from a step, on a number of ranks, to another step."""

    number: int
    """1 or 2."""
    ranks: int
    """Processes that share the work."""
    threads: int
    """Threads of each rank's arithmetic."""
    first_step: int
    """Steps done before this phase; above 0 it starts from the checkpoint."""
    last_step: int
    """Steps done after this phase."""
    options: DemoOptions
    """What the user asked for."""

    @property
    def resumed(self) -> bool:
        """Whether this phase starts from a checkpoint."""
        return self.first_step > 0

    @property
    def num_steps(self) -> int:
        """Steps of this phase."""
        return self.last_step - self.first_step

    @property
    def num_validations(self) -> int:
        """Validations of this phase: one at its end, and one right after a resume."""
        return 1 + self.resumed

    @property
    def files(self) -> OutFiles:
        """Where everything is written."""
        return OutFiles(self.options.out)


@dataclass(frozen=True, slots=True)
class OutFiles:
    """Names of everything below the out folder.

    Example:
        >>> from pathlib import Path
        >>> OutFiles(Path("demo-out")).report.as_posix()
        'demo-out/report.json'
    """

    out: Path
    """The folder."""

    @property
    def report(self) -> Path:
        """Figures of the run."""
        return self.out / "report.json"

    @property
    def picture(self) -> Path:
        """Losses of the run, drawn."""
        return self.out / "loss.png"

    @property
    def sample(self) -> Path:
        """Text that the model wrote."""
        return self.out / "sample.txt"

    @property
    def events(self) -> Path:
        """What rank 0 reports while it works: one JSON object a line."""
        return self.out / "events.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint."""
        return self.out / "checkpoint"

    @property
    def train_text(self) -> Path:
        """The training text, as the ranks read it."""
        return self.out / "train.bin"

    @property
    def validation_text(self) -> Path:
        """The validation text, as the ranks read it."""
        return self.out / "validation.bin"

    @property
    def rank_logs(self) -> Path:
        """What the ranks print."""
        return self.out / "rank-logs"


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has done in one phase."""

    rank: int
    """Which rank."""
    transport: str
    """What moved the bytes."""
    losses: tuple[float, ...]
    """Mean loss over all ranks, by step, in nats per byte."""
    validation_losses: tuple[float, ...]
    """Mean loss on the validation text: after a resume, and at the end; in nats per byte."""
    train_s: float
    """Time in training steps, in seconds."""
    collectives: dict[str, int]
    """Collectives this rank took part in while training and validating, by kind."""
    wire_bytes: int
    """Bytes this rank had to receive in them."""
    copied_bytes: int
    """Bytes this rank copied only to pack, unpack or pad them."""
    peak_pss_bytes: int
    """Most memory seen, shared pages split between the processes that hold them."""
    num_parameters: int
    """Parameters of the whole model."""
