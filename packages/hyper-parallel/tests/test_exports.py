"""The front door: names are found lazily, and looking through it imports no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hyper_parallel


def test_exports_are_sorted_and_listed_by_dir() -> None:
    assert hyper_parallel.__all__ == sorted(hyper_parallel.__all__)
    assert set(hyper_parallel.__all__) <= set(dir(hyper_parallel))


@pytest.mark.parametrize("name", hyper_parallel.__all__)
def test_export_resolves_to_object_of_its_owner(name: str) -> None:
    value = getattr(hyper_parallel, name)

    owner = getattr(value, "__module__", "hyper_parallel").split(".")[0]
    assert owner.startswith(("hp_", "hyper_parallel"))


def test_export_is_same_object_as_in_its_package() -> None:
    import hp_fully_shard  # noqa: PLC0415 - after the front door was used

    assert hyper_parallel.fully_shard is hp_fully_shard.fully_shard


def test_unknown_name_raises_attribute_error_that_lists_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'full_shard'.*fully_shard"):
        hyper_parallel.full_shard  # noqa: B018 - the look-up is the test


@pytest.mark.parametrize("module", ["hyper_parallel", "hyper_parallel.cli"])
def test_import_leaves_frameworks_and_matplotlib_out(module: str) -> None:
    heavy = "{'torch', 'mindspore', 'matplotlib', 'numpy'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


def test_import_of_front_door_leaves_other_packages_out() -> None:
    code = "import sys, hyper_parallel; print([m for m in sys.modules if m.startswith('hp_')])"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
