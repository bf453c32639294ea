"""Which framework is meant: by the object, by what is loaded, or by choice."""

import subprocess
import sys
from types import ModuleType

import pytest

from hp_mesh import FrameworkError, _framework, use_framework
from hp_mesh._framework import current_framework, framework_of, load_adapter


@pytest.fixture(autouse=True)
def _nothing_loaded_or_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_framework, "_chosen", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "mindspore", raising=False)


def load(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def instance_of(module: str) -> object:
    theirs = type("Tensor", (), {"__module__": module})
    return type("Own", (theirs,), {"__module__": "user"})()


@pytest.mark.parametrize(
    ("module", "expected"),
    [("torch", "torch"), ("torch.nn.parameter", "torch"), ("mindspore.common", "mindspore")],
)
def test_framework_of_instance_is_that_of_its_classes(
    monkeypatch: pytest.MonkeyPatch, module: str, expected: str
) -> None:
    load(monkeypatch, "torch", "mindspore")
    assert framework_of(instance_of(module)) == expected


@pytest.mark.parametrize("value", [3, None, [1], "torch", instance_of("torchvision.ops")], ids=str)
def test_framework_of_other_objects_is_none(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    load(monkeypatch, "torch")
    assert framework_of(value) is None


def test_framework_of_class_that_only_looks_like_one_not_loaded_is_none() -> None:
    assert framework_of(instance_of("torch")) is None


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_current_framework_is_the_only_one_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load(monkeypatch, name)
    assert current_framework() == name


def test_current_framework_with_none_loaded_raises() -> None:
    with pytest.raises(FrameworkError, match=r"loaded: none\. Import the one you mean"):
        current_framework()


def test_current_framework_with_both_loaded_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "torch", "mindspore")
    with pytest.raises(FrameworkError, match="loaded: torch and mindspore"):
        current_framework()


def test_chosen_framework_goes_before_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "torch", "mindspore")
    use_framework("torch")
    use_framework("mindspore")
    assert current_framework() == "mindspore"


@pytest.mark.parametrize("name", ["jax", "", None])
def test_use_framework_of_unknown_name_raises_and_changes_nothing(name: object) -> None:
    with pytest.raises(FrameworkError, match=r"isn't known. Pass one of \('torch', 'mindspore'\)"):
        use_framework(name)  # type: ignore[arg-type]  # the point of the test
    assert _framework._chosen == []


def test_load_adapter_of_package_without_one_raises() -> None:
    with pytest.raises(FrameworkError, match="hp_mesh has no adapter for mindspore"):
        load_adapter("hp_mesh", "mindspore")


def test_load_adapter_hands_on_that_the_framework_itself_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # import torch fails from here on
    for name in [name for name in sys.modules if name.startswith("hp_mesh._torch")]:
        monkeypatch.delitem(sys.modules, name)
    load_adapter.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="torch"):
        load_adapter("hp_mesh", "torch")


OPTIMIZED = """
import hp_mesh
wrong = [
    lambda: hp_mesh.Box((0,), (1, 2)),
    lambda: hp_mesh.shard_bounds(1, 0, 0),
    lambda: hp_mesh.AbstractMesh((0,), ("a",)),
    lambda: hp_mesh.DeviceMesh("gpu", [0]),
    lambda: hp_mesh.DeviceMesh("cpu", [[0], [1, 2]]),
    lambda: hp_mesh.DeviceMesh("cpu", [0, 0]),
    lambda: hp_mesh.DeviceMesh("cpu", [7]).get_group(),
    lambda: hp_mesh.as_device_mesh(1),
]
for call in wrong:
    try:
        call()
    except hp_mesh.MeshError:
        continue
    raise SystemExit(f"{call} raised nothing")
"""


def test_user_errors_are_raised_under_python_o() -> None:
    subprocess.run([sys.executable, "-O", "-c", OPTIMIZED], check=True, env={"RANK": "0"})
