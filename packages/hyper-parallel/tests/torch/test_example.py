"""The script in examples/ does what its head says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytestmark = pytest.mark.timeout(180)  # ranks import the framework, on shared cores

SCRIPT = Path(__file__).parents[4] / "examples" / "train_tiny.py"


def _torchrun(ranks: int, checkpoint: Path) -> list[tuple[int, float]]:
    """Run the script and return its steps and losses."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", str(SCRIPT), str(checkpoint)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = re.findall(r"step (\d+): loss ([\d.]+)", ended.stdout)
    return [(int(step), float(loss)) for step, loss in lines]


def test_tiny_example_learns_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    first = _torchrun(2, tmp_path / "tiny")
    second = _torchrun(1, tmp_path / "tiny")

    assert [step for step, _ in first + second] == list(range(1, 41))
    losses = [loss for _, loss in first + second]
    assert mean(losses[:5]) > mean(losses[15:20]) > mean(losses[35:])
