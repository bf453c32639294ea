"""The import contracts of pyproject.toml hold, and break on the imports that they forbid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("lint-imports"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a copy of the settings and sources."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in ROOT.glob("packages/*/src"):
        shutil.copytree(source, tmp_path / source.relative_to(ROOT))
    return tmp_path


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    sources = [str(path) for path in sorted(tree.glob("packages/*/src"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sources), "COLUMNS": "200"}
    command = [COMMAND, "--no-cache"]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)


def test_imports_keep_the_contracts(tree: Path) -> None:
    result = _lint(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("where", "line", "contract"),
    [
        ("hp-mesh/src/hp_mesh", "import hp_comm", "packages import downwards only"),
        ("hp-checkpoint/src/hp_checkpoint", "import hp_fully_shard", "packages import downwards"),
        ("hp-comm/src/hp_comm", "import torch", "pure cores import no torch"),
        ("hp-comm/src/hp_comm", "def f():\n    import torch", "pure cores import no torch"),
        ("hp-mesh/src/hp_mesh", "import mindspore", "pure cores import no MindSpore"),
        (
            "hp-fully-shard/src/hp_fully_shard",
            "from hp_fully_shard import _torch",
            "adapters are loaded by name",
        ),
    ],
    ids=["upwards", "sideways", "framework", "framework in a function", "MindSpore", "adapter"],
)
def test_forbidden_import_breaks_its_contract(
    tree: Path, where: str, line: str, contract: str
) -> None:
    (tree / "packages" / where / "stray.py").write_text(f'"""Strays."""\n\n{line}\n')
    result = _lint(tree)
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert any(row.startswith(contract) for row in broken), result.stdout
