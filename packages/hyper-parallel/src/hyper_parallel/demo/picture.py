"""What loss.png shows: the losses of both phases over the steps, and where the run was resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.demo.report import PhaseOutcome

SMOOTHED_STEPS = 20
COLOURS = ("tab:blue", "tab:orange")


def draw_losses(path: Path, outcomes: list[PhaseOutcome]) -> None:
    """Draw the losses of a run.

    Args:
        path: Where the picture goes; its ending decides the format.
        outcomes: Every phase, in order.
    """
    # Only here: the package is an extra, and takes a second to load.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for outcome, colour in zip(outcomes, COLOURS, strict=True):
        job, losses = outcome.job, outcome.results[0].losses
        steps = range(job.first_step + 1, job.last_step + 1)
        label = f"phase {job.number}: {job.ranks} rank" + "s" * (job.ranks > 1)
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(losses), color=colour, label=f"{label}, training")
        axes.plot(
            [job.last_step],
            [outcome.val_loss],
            color=colour,
            marker="o",
            linestyle="none",
            label=f"{label}, validation {outcome.val_loss:.3f}",
        )
    for outcome in outcomes:
        if outcome.job.resumed:
            step = outcome.job.first_step
            label = f"saved and resumed at step {step}"
            axes.axvline(step, color="grey", linestyle="--", label=label)
    axes.set(title="Byte-level GPT trained with fully_shard", xlabel="step", ylabel="nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def smooth(losses: tuple[float, ...]) -> list[float]:
    """Return the mean of each loss and those of up to 19 steps before it.

    Example:
        >>> smooth((4.0, 2.0, 3.0))
        [4.0, 3.0, 3.0]
    """
    windows = (losses[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(losses) + 1))
    return [sum(window) / len(window) for window in windows]
