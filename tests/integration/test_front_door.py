"""The names and the command that users meet first."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel

COMMAND = str(Path(sys.executable).with_name("hyper-parallel"))
NAMES = sorted(set(hyper_parallel.__all__) - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_one_of_the_package_that_owns_it(name: str) -> None:
    value = getattr(hyper_parallel, name)
    owner = value.__module__.split(".")[0]
    assert getattr(importlib.import_module(owner), name) is value


def test_command_is_installed_and_says_its_version() -> None:
    result = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == hyper_parallel.__version__


def test_command_without_arguments_lists_the_demo() -> None:
    result = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert "demo" in result.stdout
