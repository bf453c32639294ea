"""The script in benchmarks/ runs, and finds losses that disagree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "step_time.py"


@pytest.mark.timeout(180)  # ranks import the framework, on shared cores
def test_step_time_measures_all_modes_and_their_losses_agree(tmp_path: Path) -> None:
    arguments = ["--config", "tiny", "--steps", "4", "--malloc", "default"]

    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--json", str(tmp_path / "figures.json")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["runs"][0]["figures"]
    assert list(figures) == ["plain", "ddp", "fsdp2", "ours"]
    assert figures["fsdp2"]["ratio_to_fsdp2"] == [1.0, 1.0, 1.0]
    assert all(figure["wall_ms"][0] > 0 for figure in figures.values())
    assert "losses agree" in ended.stdout
