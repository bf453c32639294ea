"""Importing a package, or any pure module of it, loads no framework."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Package

SKIPPED = {
    "__main__.py",  # runs the command
    "preload.py",  # loads the framework for ranks of tests: that is all it does
}
CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = {"torch", "mindspore"} & set(sys.modules)
    assert not found, f"{name} loads {found}"
"""


def _import(*names: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHECK, *names]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def _dotted(package: Package, path: Path) -> str:
    parts = [package.import_name, *path.relative_to(package.source).with_suffix("").parts]
    return ".".join(part for part in parts if part != "__init__")


def test_package_loads_no_framework(package: Package, tmp_path: Path) -> None:
    result = _import(package.import_name, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_pure_modules_load_no_framework(package: Package, tmp_path: Path) -> None:
    paths = [path for path in package.modules(adapters=False) if path.name not in SKIPPED]
    result = _import(*(_dotted(package, path) for path in paths), cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_check_notices_a_framework(framework: str, tmp_path: Path) -> None:
    (tmp_path / f"{framework}.py").touch()
    (tmp_path / "leaky.py").write_text(f"import {framework}\n")
    result = _import("leaky", cwd=tmp_path)
    assert f"leaky loads {{'{framework}'}}" in result.stderr
