"""What the report holds and what progress prints."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

from rich.console import Console

from hyper_parallel.demo.events import Event
from hyper_parallel.demo.job import PhaseJob, RankResult
from hyper_parallel.demo.options import DemoOptions, ModelShape
from hyper_parallel.demo.progress import PhaseProgress
from hyper_parallel.demo.report import PhaseOutcome, build_report, count_collectives, write_report
from hyper_parallel.demo.run import plan_phases
from hyper_parallel.demo.text import Corpus

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = DemoOptions(steps=20, ranks=2, resume_ranks=1, model=ModelShape(layers=1, context=10))
CORPUS = Corpus(b"abc\0", b"d\0", ("a",), ("b",))


def _result(rank: int, job: PhaseJob, *, train_s: float) -> RankResult:
    return RankResult(
        rank=rank,
        transport="shm",
        losses=(2.0,) * job.num_steps,
        validation_losses=(1.75,) * job.resumed + (1.5,),
        train_s=train_s,
        collectives={"all_gather": 70, "broadcast": 1},
        wire_bytes=1000 + rank,
        copied_bytes=0,
        peak_pss_bytes=10 + rank,
        num_parameters=99,
    )


def _outcomes() -> list[PhaseOutcome]:
    first, second = plan_phases(OPTIONS)
    return [
        PhaseOutcome(first, (_result(0, first, train_s=4.0), _result(1, first, train_s=5.0))),
        PhaseOutcome(second, (_result(0, second, train_s=2.0),)),
    ]


def test_report_sums_phases_and_takes_last_validation_loss(tmp_path: Path) -> None:
    report = build_report(OPTIONS, CORPUS, _outcomes(), total_s=9.0, versions={"torch": "x"})
    write_report(tmp_path / "report.json", report)

    written = json.loads((tmp_path / "report.json").read_text())
    assert written["val_loss"] == 1.5
    assert written["train_s"] == 7.0
    assert written["versions"]["torch"] == "x"
    first, second = written["phases"]
    assert first["tokens_per_s"] == 10 * 12 * 10 / 5.0
    assert first["peak_pss_bytes"] == 21
    assert first["wire_bytes_by_rank"] == [1000, 1001]
    assert (first["val_loss_after_resume"], second["val_loss_after_resume"]) == (None, 1.75)
    assert len(first["losses"]) + len(second["losses"]) == OPTIONS.steps


def test_collectives_show_counted_beside_expected_also_for_surprises() -> None:
    counts = count_collectives(_outcomes()[0])

    # One block and the root: 10 steps with 3 gathers, 20 validation batches with 2.
    assert counts["all_gather"] == {"counted": 70, "expected": 70}
    assert counts["reduce_scatter"] == {"counted": 0, "expected": 20}
    assert counts["broadcast"] == {"counted": 1, "expected": 0}


def test_progress_off_a_terminal_prints_lines_now_and_then() -> None:
    out = io.StringIO()
    job = plan_phases(DemoOptions(steps=200, ranks=2, resume_ranks=1))[0]

    with PhaseProgress(job, Console(file=out, width=120)) as progress:
        for step in range(1, 101):
            progress.receive(Event("stepped", 1, step, loss=2.0, train_s=step / 10))
        progress.receive(Event("validated", 1, 100, loss=1.25))
        progress.receive(Event("saved", 1, 100))

    lines = out.getvalue().splitlines()
    assert lines[0] == "phase 1: 2 ranks, from scratch to step 100"
    assert len([line for line in lines if "tokens/s" in line]) == 10
    assert lines[1] == "  step 10: loss 2.000  7,680 tokens/s  ETA 9 s"
    assert "  step 100: validation loss 1.2500 nats per byte" in lines
    assert progress.last_step == progress.saved_step == 100


def test_progress_on_a_terminal_shows_loss_speed_and_time_left() -> None:
    out = io.StringIO()
    job = plan_phases(DemoOptions(steps=200, ranks=2, resume_ranks=1))[0]

    with PhaseProgress(job, Console(file=out, width=120, force_terminal=True)) as progress:
        progress.receive(Event("stepped", 1, 50, loss=2.125, train_s=5.0))

    assert "step 50/100" in out.getvalue()
    assert "loss 2.125  7,680 tokens/s" in out.getvalue()
    assert "ETA" in out.getvalue()
