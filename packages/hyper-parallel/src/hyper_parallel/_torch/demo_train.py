"""The work of one rank in one phase of the demo.

Every rank takes its contiguous part of the same global batch, and the loss is the mean over
ranks of equally many sequences: so the numbers do not depend on the number of ranks but for the
order of floating-point sums.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

import hp_comm
from hp_fully_shard import fully_shard
from hp_mesh import init_device_mesh
from hyper_parallel._torch.demo_model import ByteGPT, next_byte_loss
from hyper_parallel._torch.demo_state import Progress, load_checkpoint, save_checkpoint
from hyper_parallel.demo.events import Event, EventKind, EventWriter
from hyper_parallel.demo.job import VALIDATION_BATCHES, PhaseJob, RankResult
from hyper_parallel.demo.schedule import learning_rate
from hyper_parallel.demo.text import WindowOrder, count_windows, spread_windows

if TYPE_CHECKING:
    from collections.abc import Iterator

EPSILON = 1e-6
"""Of AdamW. With its usual 1e-8 the rounding of sums, which depends on the number of ranks, grows
several times faster over the steps; with this, losses stay within 1e-3 for a whole run."""
MEMORY_EVERY_STEPS = 10


def train_rank(job: PhaseJob) -> RankResult:
    """Do this process's part of a phase; torchrun's environment says which part.

    Args:
        job: The phase, equal on every rank.

    Returns:
        What was done, in figures.
    """
    # A signal to end ends this process at once: there is nothing to tidy up, and a handler
    # written in Python would wait for whatever native code runs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(job.threads)
    distributed.init_process_group("gloo")
    try:
        return train_in_group(job)
    finally:
        distributed.destroy_process_group()


def train_in_group(job: PhaseJob) -> RankResult:
    """Do this process's part of a phase; its process group exists already.

    Args:
        job: The phase, equal on every rank.

    Returns:
        What was done, in figures.
    """
    return _RankTraining(job).run()


class _RankTraining:
    """Model, optimizer, text and figures of one rank."""

    def __init__(self, job: PhaseJob) -> None:
        self._job = job
        self._rank = distributed.get_rank()
        options = job.options
        self._model = ByteGPT(options.model, seed=options.seed)
        self._num_parameters = sum(p.numel() for p in self._model.parameters())
        _shard(self._model, job.ranks)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.1, fused=True
        )
        self._text = _BatchReader(job, self._rank)
        self._losses: list[float] = []
        self._validation_losses: list[float] = []
        self._peak_pss_bytes = 0
        self._train_s = 0.0

    def run(self) -> RankResult:
        job = self._job
        progress = Progress(step=0, position=0)
        with _event_writer(job, self._rank) as events:
            if job.resumed:
                progress = load_checkpoint(job.files.checkpoint, self._model, self._optimizer)
            self._report(events, "started", progress.step)
            with hp_comm.CommTrace() as trace:
                if job.resumed:
                    self._validate(events, progress.step)
                progress = self._train(events, progress)
                self._validate(events, progress.step)
            save_checkpoint(job.files.checkpoint, self._model, self._optimizer, progress)
            self._report(events, "saved", progress.step)
        return RankResult(
            rank=self._rank,
            transport=hp_comm.communicator().transport,
            losses=tuple(self._losses),
            validation_losses=tuple(self._validation_losses),
            train_s=self._train_s,
            collectives=dict(trace.counts()),
            wire_bytes=trace.wire_bytes(),
            copied_bytes=trace.copied_bytes(),
            peak_pss_bytes=self._peak_pss_bytes,
            num_parameters=self._num_parameters,
        )

    def _train(self, events: EventWriter | None, progress: Progress) -> Progress:
        options = self._job.options
        for step in range(progress.step, self._job.last_step):
            start_s = time.perf_counter()
            position = progress.position + (step - progress.step) * options.batch
            loss = self._step(step, self._text.training_batch(position))
            self._train_s += time.perf_counter() - start_s
            self._losses.append(loss)
            self._report(events, "stepped", step + 1, loss)
        done = self._job.last_step - progress.step
        return Progress(self._job.last_step, progress.position + done * options.batch)

    def _step(self, step: int, windows: Tensor) -> float:
        options = self._job.options
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=options.steps, peak=options.learning_rate)
        loss = next_byte_loss(self._model, windows)
        loss.backward()
        if step % MEMORY_EVERY_STEPS == 0:
            self._peak_pss_bytes = max(self._peak_pss_bytes, read_pss_bytes())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return _mean_over_ranks(loss)

    @torch.no_grad()
    def _validate(self, events: EventWriter | None, step: int) -> None:
        batches = [self._text.validation_batch(number) for number in range(VALIDATION_BATCHES)]
        losses = [_mean_over_ranks(next_byte_loss(self._model, batch)) for batch in batches]
        loss = sum(losses) / len(losses)
        self._validation_losses.append(loss)
        self._report(events, "validated", step, loss)

    def _report(
        self, events: EventWriter | None, kind: EventKind, step: int, loss: float | None = None
    ) -> None:
        if events is not None:
            events.write(Event(kind, self._job.number, step, loss, self._train_s))


class _BatchReader:
    """Cuts this rank's part of every batch out of the texts."""

    def __init__(self, job: PhaseJob, rank: int) -> None:
        options = job.options
        share = options.batch // job.ranks
        self._mine = slice(rank * share, (rank + 1) * share)
        self._batch = options.batch
        self._context = options.model.context
        self._train = _map_bytes(job.files.train_text)
        self._validation = _map_bytes(job.files.validation_text)
        self._order = WindowOrder(self._count(self._train), options.seed)
        self._spread = spread_windows(
            self._count(self._validation), VALIDATION_BATCHES * options.batch
        )

    def training_batch(self, position: int) -> Tensor:
        """Return this rank's windows of the batch that starts at a position; "B S+1"."""
        return self._cut(self._train, self._order.windows(position, self._batch))

    def validation_batch(self, number: int) -> Tensor:
        """Return this rank's windows of one validation batch; "B S+1"."""
        start = number * self._batch
        return self._cut(self._validation, self._spread[start : start + self._batch])

    def _cut(self, text: Tensor, windows: list[int]) -> Tensor:
        starts = [window * self._context for window in windows[self._mine]]
        return torch.stack([text[start : start + self._context + 1] for start in starts])

    def _count(self, text: Tensor) -> int:
        return count_windows(text.numel(), self._context)


def _shard(model: ByteGPT, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _map_bytes(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def _mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone()
    hp_comm.all_reduce(mean, op="avg")
    return mean.item()


def read_pss_bytes() -> int:
    """Return the memory of this process, shared pages split between those who hold them.

    Returns:
        Bytes; 0 where the system doesn't tell.
    """
    path = Path("/proc/self/smaps_rollup")
    if not path.exists():
        return 0
    lines = path.read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


@contextmanager
def _event_writer(job: PhaseJob, rank: int) -> Iterator[EventWriter | None]:
    if rank:
        yield None
        return
    with EventWriter(job.files.events) as writer:
        yield writer
