"""What the terminal shows while ranks train: a live bar, or a line now and then.

On a terminal a bar with loss, tokens per second and the time left; anywhere else (a pipe, a log
of a CI run) a plain line for about every tenth of a phase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

    from hyper_parallel.demo.events import Event
    from hyper_parallel.demo.job import PhaseJob

LINES_PER_PHASE = 10


class PhaseProgress:
    """Shows one phase; give it to an `EventFollower` while it is entered."""

    def __init__(self, job: PhaseJob, console: Console) -> None:
        self._job = job
        self._console = console
        self._last_line_step = job.first_step
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("step {task.completed}/{task.total}  {task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self.last_step = job.first_step
        self.saved_step: int | None = None

    def __enter__(self) -> PhaseProgress:
        job = self._job
        start = f"from the checkpoint at step {job.first_step}" if job.resumed else "from scratch"
        ranks = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
        self._console.print(
            f"phase {job.number}: {ranks}, {start} to step {job.last_step}", highlight=False
        )
        self._bar.start()
        self._task = self._bar.add_task(
            f"phase {job.number}", total=job.num_steps, figures="starting ranks"
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def receive(self, event: Event) -> None:
        """Show one event."""
        self.last_step = event.step
        if event.kind == "stepped":
            self._show_step(event)
        elif event.kind == "validated" and event.loss is not None:
            self._print(f"step {event.step}: validation loss {event.loss:.4f} nats per byte")
        elif event.kind == "saved":
            self.saved_step = event.step
            self._print(f"step {event.step}: saved {self._job.files.checkpoint}")

    def _show_step(self, event: Event) -> None:
        done = event.step - self._job.first_step
        figures = f"loss {event.loss:.3f}  {self._tokens_per_s(done, event.train_s):,.0f} tokens/s"
        if self._console.is_terminal:
            assert self._task is not None, "the bar is made when this is entered"
            self._bar.update(self._task, completed=done, figures=figures)
            return
        every = max(1, self._job.num_steps // LINES_PER_PHASE)
        if event.step - self._last_line_step >= every:
            self._last_line_step = event.step
            left_s = event.train_s / done * (self._job.num_steps - done)
            self._print(f"step {event.step}: {figures}  ETA {left_s:.0f} s")

    def _tokens_per_s(self, steps: int, train_s: float) -> float:
        options = self._job.options
        return steps * options.batch * options.model.context / max(train_s, 1e-9)

    def _print(self, line: str) -> None:
        self._console.print(f"  {line}", highlight=False, soft_wrap=True)
