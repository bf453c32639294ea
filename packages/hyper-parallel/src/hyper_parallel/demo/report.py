"""What report.json holds: every figure of a run, measured, and beside it what was expected."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hyper_parallel.demo.job import VALIDATION_BATCHES, PhaseJob, RankResult
from hyper_parallel.demo.schedule import expected_collectives

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.demo.options import DemoOptions
    from hyper_parallel.demo.text import Corpus

DISTRIBUTIONS = (
    "hyper-parallel",
    "hp-mesh",
    "hp-comm",
    "hp-dtensor",
    "hp-fully-shard",
    "hp-checkpoint",
    "rich",
    "typer",
    "matplotlib",
)


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """A phase and what all its ranks have done."""

    job: PhaseJob
    """What was asked for."""
    results: tuple[RankResult, ...]
    """By rank."""

    @property
    def val_loss(self) -> float:
        """Validation loss at the end of the phase, in nats per byte."""
        return self.results[0].validation_losses[-1]

    @property
    def train_s(self) -> float:
        """Time of the slowest rank in training steps, in seconds."""
        return max(result.train_s for result in self.results)

    @property
    def tokens_per_s(self) -> float:
        """Bytes of text trained on per second, over all ranks."""
        options = self.job.options
        tokens = self.job.num_steps * options.batch * options.model.context
        return tokens / max(self.train_s, 1e-9)


def build_report(
    options: DemoOptions,
    corpus: Corpus,
    outcomes: list[PhaseOutcome],
    *,
    total_s: float,
    versions: dict[str, str],
) -> dict[str, Any]:
    """Put a run into plain values.

    Args:
        options: What was asked for.
        corpus: The text.
        outcomes: Every phase, in order.
        total_s: Time of the whole command, in seconds.
        versions: Of the framework; those of the packages are added.

    Returns:
        What `report.json` holds; top level: `val_loss` in nats per byte, `train_s` and `total_s`
        in seconds, `options`, `text`, `phases`, `versions`.
    """
    return {
        "val_loss": outcomes[-1].val_loss,
        "train_s": sum(outcome.train_s for outcome in outcomes),
        "total_s": total_s,
        "num_parameters": outcomes[0].results[0].num_parameters,
        "options": _plain_options(options),
        "text": _describe_text(corpus),
        "phases": [_describe_phase(outcome) for outcome in outcomes],
        "versions": {**_package_versions(), **versions},
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def count_collectives(outcome: PhaseOutcome) -> dict[str, dict[str, int]]:
    """Return, by kind, how many collectives rank 0 took part in and how many were expected.

    Args:
        outcome: One phase.

    Returns:
        `{"all_gather": {"counted": ..., "expected": ...}, ...}`.
    """
    job = outcome.job
    expected = expected_collectives(
        num_blocks=job.options.model.layers,
        num_steps=job.num_steps,
        num_validation_batches=job.num_validations * VALIDATION_BATCHES,
    )
    counted = outcome.results[0].collectives
    return {
        kind: {"counted": counted.get(kind, 0), "expected": expected.get(kind, 0)}
        for kind in sorted(set(expected) | set(counted))
    }


def _describe_phase(outcome: PhaseOutcome) -> dict[str, Any]:
    job, first = outcome.job, outcome.results[0]
    pss_bytes = [result.peak_pss_bytes for result in outcome.results]
    return {
        "number": job.number,
        "ranks": job.ranks,
        "threads_per_rank": job.threads,
        "transport": first.transport,
        "first_step": job.first_step,
        "last_step": job.last_step,
        "losses": list(first.losses),
        "val_loss_after_resume": first.validation_losses[0] if job.resumed else None,
        "val_loss": outcome.val_loss,
        "train_s": outcome.train_s,
        "tokens_per_s": outcome.tokens_per_s,
        "collectives": count_collectives(outcome),
        "wire_bytes_by_rank": [result.wire_bytes for result in outcome.results],
        "copied_bytes_by_rank": [result.copied_bytes for result in outcome.results],
        "peak_pss_bytes_by_rank": pss_bytes,
        "peak_pss_bytes": sum(pss_bytes),
    }


def _describe_text(corpus: Corpus) -> dict[str, int]:
    return {
        "train_files": len(corpus.train_files),
        "train_bytes": len(corpus.train),
        "validation_files": len(corpus.validation_files),
        "validation_bytes": len(corpus.validation),
    }


def _plain_options(options: DemoOptions) -> dict[str, Any]:
    plain = asdict(options)
    plain["out"] = str(options.out)
    plain["text"] = None if options.text is None else str(options.text)
    return plain


def _package_versions() -> dict[str, str]:
    found = {name: _installed_version(name) for name in DISTRIBUTIONS}
    return {"python": platform.python_version(), **found}


def _installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
