"""The rules of CONVENTIONS.md that a machine can check."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Package

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
EMPTY_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "base", "misc"}
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.txt")


def _files(root: Path, pattern: str) -> list[Path]:
    skipped = {".nox", "dist", "build", "demo-out", "bench-out", ".venv", "venv"}
    found = root.rglob(pattern)
    return sorted(path for path in found if not skipped & set(path.relative_to(root).parts))


def test_files_stay_short(package: Package) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in package.modules()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_stay_short(package: Package) -> None:
    too_long = []
    for path in package.modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert too_long == []


def test_modules_have_telling_names(package: Package) -> None:
    parts = {part for path in package.modules() for part in path.relative_to(package.source).parts}
    assert {part.removesuffix(".py").lstrip("_") for part in parts} & EMPTY_NAMES == set()


def test_modules_say_what_they_decide(package: Package) -> None:
    silent = [
        path for path in package.modules() if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_packages_are_typed_and_documented(package: Package) -> None:
    names = ["README.md", "CHANGELOG.md", "LICENSE", "changes"]
    missing = [name for name in names if not (package.folder / name).exists()]
    assert (package.source / "py.typed").exists()
    assert missing == []


def test_no_broad_except(package: Package) -> None:
    broad = re.compile(r"except\s*(\(?\s*(Base)?Exception\b|:)")
    found = [path for path in package.modules() if broad.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize("pattern", TEXT_FILES)
def test_text_is_ascii(root: Path, pattern: str) -> None:
    strange = [path for path in _files(root, pattern) if not path.read_bytes().isascii()]
    assert strange == []


def test_nothing_is_left_to_do(root: Path) -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [path for path in _files(root, "*.py") if mark.search(path.read_text())]
    assert found == []
