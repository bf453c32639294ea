"""A package made by tools/new_package.py is listed, layered, built and tested like the others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS = "Feeds ranks with data."


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the repository's lists, tools and packages."""
    for name in ("pyproject.toml", "noxfile.py", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tools", "packages", "tests/packaging"):
        skipped = shutil.ignore_patterns("__pycache__", "test_new_package.py")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    return tmp_path


def _run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def _make(tree: Path, name: str, above: str) -> subprocess.CompletedProcess[str]:
    return _run(tree, "tools/new_package.py", name, "--above", above, "--says", SAYS)


@pytest.mark.parametrize("above", ["hp-comm", "hp-checkpoint"])
def test_new_package_passes_the_packaging_tests(tree: Path, above: str) -> None:
    assert _make(tree, "hp-data", above).returncode == 0
    # That the sibling is imported is for its author to do.
    settings = ("-p", "no:cacheprovider", "-k", "hp-data and not siblings_are_imported")
    result = _run(tree, "-m", "pytest", "-q", *settings, "tests/packaging", "packages/hp-data")
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


def test_new_package_stands_right_above_the_one_named(tree: Path) -> None:
    _make(tree, "hp-data", "hp-comm")
    stack = (tree / "noxfile.py").read_text().split("STACK = (\n")[1].split("\n)")[0].split()
    lists = (tree / "pyproject.toml").read_text()
    layers = lists.split("layers = [\n")[1].split("\n]")[0].split()
    assert stack.index('"hp-data",') == stack.index('"hp-comm",') + 1
    assert layers.index('"hp_data",') == layers.index('"hp_comm",') - 1


def test_new_package_is_entered_in_every_list(tree: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    num_lists = text.count('"hp_comm"') + text.count("packages/hp-comm/src")
    _make(tree, "hp-data", "hp-comm")
    text = (tree / "pyproject.toml").read_text()
    assert text.count('"hp_data"') + text.count("packages/hp-data/src") == num_lists


@pytest.mark.parametrize(
    ("name", "above", "complaint"),
    [
        ("hp-mesh", "hp-comm", "'hp-mesh' is there already"),
        ("Data", "hp-comm", "'Data' is no package name here: use one like 'hp-data'"),
        ("hp-data", "hp-none", "no package 'hp-none' to stand above; there are"),
    ],
    ids=["taken", "no name", "no neighbour"],
)
def test_wrong_arguments_change_nothing(tree: Path, name: str, above: str, complaint: str) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    result = _make(tree, name, above)
    assert result.returncode == 2
    assert complaint in result.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert {path for path in tree.rglob("*") if path.is_file()} == set(before)
