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


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler takes every error and lets none of them out again."""
    caught = ast.walk(handler.type) if handler.type else [ast.Name("BaseException")]
    names = {node.id for node in caught if isinstance(node, ast.Name)}
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
    return "Exception" in names or ("BaseException" in names and not raises)


def test_no_error_is_swallowed(package: Package) -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in package.modules()
        if "testing" not in path.parts  # runs a test's code and hands its errors on
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and _swallows(node)
    ]
    assert found == []


@pytest.mark.parametrize("pattern", TEXT_FILES)
def test_text_is_ascii(root: Path, pattern: str) -> None:
    strange = [path for path in _files(root, pattern) if not path.read_bytes().isascii()]
    assert strange == []


def test_nothing_is_left_to_do(root: Path) -> None:
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [path for path in _files(root, "*.py") if mark.search(path.read_text())]
    assert found == []
