"""What is in the built files, and that building twice gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Package


def _build(package: Package, target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=package.folder, check=True, capture_output=True)
    return next(folder.iterdir())


def test_wheel_built_twice_has_the_same_bytes(package: Package, tmp_path: Path) -> None:
    digests = {
        hashlib.sha256(_build(package, "wheel", tmp_path / name).read_bytes()).hexdigest()
        for name in ("first", "second")
    }
    assert len(digests) == 1


def test_wheel_holds_the_sources_and_nothing_else(package: Package, tmp_path: Path) -> None:
    with zipfile.ZipFile(_build(package, "wheel", tmp_path)) as archive:
        names = set(archive.namelist())
    info = f"{package.import_name}-{package.version}.dist-info"
    packed = {name for name in names if not name.startswith(f"{info}/")}
    sources = {
        os.path.relpath(path, package.source.parent)
        for path in package.source.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == sources
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.parametrize("wanted", ["tests", "src", "README.md", "CHANGELOG.md", "LICENSE"])
def test_sdist_can_test_itself(package: Package, wanted: str, tmp_path: Path) -> None:
    with tarfile.open(_build(package, "sdist", tmp_path)) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert wanted in top
    assert top <= {
        "src",
        "tests",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
