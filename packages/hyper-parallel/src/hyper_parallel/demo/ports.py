"""What the demo asks of a framework; `_torch` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.demo.job import PhaseJob, RankResult
    from hyper_parallel.demo.options import DemoOptions


class Engine(Protocol):
    """Trains the model on local ranks and lets it write."""

    def run_phase(self, job: PhaseJob) -> list[RankResult]:
        """Start the ranks of one phase and return their results by rank.

        Raises:
            RankError: A rank ended early; the others have been ended too.
            DemoInterrupted: A signal arrived; all ranks have been ended.
        """
        ...

    def write_sample(self, checkpoint: Path, options: DemoOptions, num_bytes: int) -> bytes:
        """Return text that the saved model continues a prompt with, prompt included."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of the framework and what it stands on."""
        ...
