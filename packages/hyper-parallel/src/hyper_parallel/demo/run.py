"""The order of the demo: check everything, train, save, go on with other ranks, write, report.

Nothing is written and no rank is started before all that the user asked for was found good.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from hp_mesh._framework import load_adapter
from hyper_parallel.demo.events import EventFollower, EventReader
from hyper_parallel.demo.job import OutFiles, PhaseJob
from hyper_parallel.demo.picture import draw_losses
from hyper_parallel.demo.progress import PhaseProgress
from hyper_parallel.demo.report import PhaseOutcome, build_report, write_report
from hyper_parallel.demo.text import Corpus, count_windows, read_folder, read_stdlib
from hyper_parallel.errors import DemoError, DemoInterrupted, RankError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console

    from hyper_parallel.demo.options import DemoOptions
    from hyper_parallel.demo.ports import Engine

SAMPLE_BYTES = 500
MAX_THREADS_PER_RANK = 4


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo and write its report.

    Args:
        options: What the user asked for.
        console: Where progress is shown.

    Returns:
        What `report.json` holds.

    Raises:
        DemoError: Something asked for can't be done; no rank was started.
        RankError: A rank ended early; all have ended, and the message says what was saved.
        DemoInterrupted: A signal arrived; all ranks have ended, and it says what was saved.
    """
    with _signals_raised():
        return _DemoRun(options, console).run()


class _DemoRun:
    """One run; knows what has been saved so far."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._files = OutFiles(options.out)
        self._events = EventReader(self._files.events)
        self._last_step = 0
        self._saved_step: int | None = None
        self._start_s = time.perf_counter()

    def run(self) -> dict[str, Any]:
        try:
            return self._run()
        except RankError as error:
            raise RankError(f"{error} {self._describe_saved()}") from error
        except DemoInterrupted as error:
            raise DemoInterrupted(error.signum, self._describe_saved()) from error

    def _run(self) -> dict[str, Any]:
        corpus = read_text(self._options)
        _require_installed()
        prepare_out(self._files)
        self._print(
            f"text: {len(corpus.train_files)} files, {len(corpus.train) / 1e6:.1f} MB to train on; "
            f"{len(corpus.validation_files)} files, {len(corpus.validation) / 1e6:.1f} MB to "
            f"validate on"
        )
        self._files.train_text.write_bytes(corpus.train)
        self._files.validation_text.write_bytes(corpus.validation)
        engine = cast("Engine", load_adapter("hyper_parallel", "torch"))
        outcomes = [self._run_phase(engine, job) for job in plan_phases(self._options)]
        return self._finish(engine, corpus, outcomes)

    def _run_phase(self, engine: Engine, job: PhaseJob) -> PhaseOutcome:
        with PhaseProgress(job, self._console) as progress:
            try:
                with EventFollower(self._events, progress.receive):
                    results = engine.run_phase(job)
            finally:
                self._last_step = progress.last_step
                self._saved_step = progress.saved_step or self._saved_step
        return PhaseOutcome(job, tuple(results))

    def _finish(
        self, engine: Engine, corpus: Corpus, outcomes: list[PhaseOutcome]
    ) -> dict[str, Any]:
        sample = engine.write_sample(self._files.checkpoint, self._options, SAMPLE_BYTES)
        self._files.sample.write_bytes(sample)
        self._print("what the model writes:")
        self._print(printable(sample))
        report = build_report(
            self._options,
            corpus,
            outcomes,
            total_s=time.perf_counter() - self._start_s,
            versions=engine.versions(),
        )
        draw_losses(self._files.picture, outcomes)
        write_report(self._files.report, report)
        self._print(
            f"validation loss {report['val_loss']:.4f} nats per byte after "
            f"{report['train_s']:.0f} s of training ({report['total_s']:.0f} s in all)"
        )
        names = (self._files.report, self._files.picture, self._files.checkpoint)
        self._print("wrote " + ", ".join(map(str, names)))
        return report

    def _describe_saved(self) -> str:
        done = f"{self._last_step} of {self._options.steps} steps were done"
        if self._saved_step is None:
            first = self._options.first_phase_steps
            return f"{done}; nothing was saved, the first checkpoint comes after step {first}."
        return f"{done}; {self._files.checkpoint} holds the state after step {self._saved_step}."

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def plan_phases(options: DemoOptions) -> list[PhaseJob]:
    """Return both phases of a run.

    Args:
        options: What the user asked for.

    Returns:
        Phase 1 up to the checkpoint, and phase 2 from it to the end.

    Example:
        >>> from hyper_parallel.demo.options import DemoOptions
        >>> [(job.ranks, job.first_step, job.last_step) for job in plan_phases(DemoOptions())]
        [(2, 0, 300), (3, 300, 600)]
    """
    middle = options.first_phase_steps
    parts = ((options.ranks, 0, middle), (options.resume_ranks, middle, options.steps))
    return [
        PhaseJob(
            number=number,
            ranks=ranks,
            threads=_threads_per_rank(ranks),
            first_step=first,
            last_step=last,
            options=options,
        )
        for number, (ranks, first, last) in enumerate(parts, start=1)
    ]


def read_text(options: DemoOptions) -> Corpus:
    """Read the text that was asked for.

    Args:
        options: What the user asked for.

    Returns:
        The text, with at least one batch to train on and one sequence to validate on.

    Raises:
        DemoError: There is no such text, or too little of it.
    """
    corpus = read_stdlib() if options.text is None else read_folder(options.text)
    context = options.model.context
    if count_windows(len(corpus.train), context) < options.batch:
        raise DemoError(
            f"the text holds {len(corpus.train)} bytes to train on, less than one batch of "
            f"{options.batch} sequences of {context} bytes: pass a larger --text."
        )
    if count_windows(len(corpus.validation), context) < 1:
        raise DemoError(
            f"the text holds {len(corpus.validation)} bytes to validate on, less than one "
            f"sequence of {context} bytes: pass a larger --text."
        )
    return corpus


def prepare_out(files: OutFiles) -> None:
    """Make the out folder and remove what an earlier run reported there.

    Args:
        files: Names in the folder.

    Raises:
        DemoError: The folder can't be made or written.
    """
    try:
        files.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=files.out):
            pass
        for old in (files.report, files.picture, files.sample, files.events):
            old.unlink(missing_ok=True)
        shutil.rmtree(files.rank_logs, ignore_errors=True)
    except OSError as error:
        raise DemoError(
            f"--out {str(files.out)!r} can't be written ({error.strerror}): pass a folder that can."
        ) from error


def printable(text: bytes) -> str:
    """Return text that a terminal shows and doesn't obey.

    Args:
        text: Any bytes.

    Returns:
        The text; a question mark for whatever isn't UTF-8 or isn't to be seen.

    Example:
        >>> printable(bytes([100, 27, 101, 255]))
        'd?e?'
    """
    shown = (c if c.isprintable() or c in "\n\t" else "?" for c in text.decode(errors="replace"))
    return "".join(shown).replace("\N{REPLACEMENT CHARACTER}", "?")


def _require_installed() -> None:
    for module, extra in (("torch", "torch"), ("matplotlib", "demo")):
        if importlib.util.find_spec(module) is None:
            raise DemoError(
                f"the demo needs {module}, which isn't installed: "
                f'pip install "hyper-parallel[{extra}]".'
            )


def _threads_per_rank(ranks: int) -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MAX_THREADS_PER_RANK, max(1, (usable or 1) // ranks))


@contextmanager
def _signals_raised() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise DemoInterrupted(signum)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
