"""Mistakes on the command line: one line on stderr, exit code 2, nothing left behind.

These need no framework: everything here is found out before one is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hyper_parallel import __version__
from hyper_parallel.demo.job import OutFiles
from hyper_parallel.demo.run import prepare_out
from hyper_parallel.errors import DemoError

if TYPE_CHECKING:
    from pathlib import Path


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0 asks for no rank at all"),
        (["--text", "nowhere"], "--text 'nowhere' isn't a folder"),
        (["--text", "small"], "less than one batch of 12 sequences"),
        (["--transport", "pigeon"], "--transport 'pigeon' isn't known"),
    ],
    ids=["no ranks", "no such folder", "small text", "unknown transport"],
)
def test_demo_with_wrong_input_says_so_in_one_line(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a").write_text("a few words")
    (tmp_path / "small" / "b").write_text("and a few more")

    ended = _run("demo", *arguments, folder=tmp_path)

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert message in ended.stderr
    assert os.listdir(tmp_path) == ["small"]


def test_out_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DemoError, match=r"can't be written \(Not a directory\)"):
        prepare_out(OutFiles(tmp_path / "file" / "out"))


def test_out_removes_old_results_and_nothing_else(tmp_path: Path) -> None:
    files = OutFiles(tmp_path)
    for path in (files.report, files.events, tmp_path / "mine.txt"):
        path.write_text("old")
    files.rank_logs.mkdir()

    prepare_out(files)

    assert os.listdir(tmp_path) == ["mine.txt"]


def test_version_is_printed(tmp_path: Path) -> None:
    ended = _run("--version", folder=tmp_path)

    assert (ended.returncode, ended.stdout.strip()) == (0, __version__)


def test_help_lists_every_option(tmp_path: Path) -> None:
    ended = _run("demo", "--help", folder=tmp_path)

    assert ended.returncode == 0
    for option in ("--ranks", "--resume-ranks", "--out", "--text", "--steps", "--transport"):
        assert option in ended.stdout
