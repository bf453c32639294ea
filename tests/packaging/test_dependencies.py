"""What packages declare fits what they import, and siblings fit each other."""

from __future__ import annotations

import ast
import re
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Package

FRAMEWORKS = {"torch", "mindspore", "numpy"}
OPTIONAL = {"hyper-parallel": {"matplotlib"}}  # extra `demo`


def _declared(package: Package) -> dict[str, Requirement]:
    requirements = [Requirement(text) for text in package.project["dependencies"]]
    return {requirement.name: requirement for requirement in requirements}


def _imported(paths: list[Path]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names


def test_sibling_ranges_admit_the_versions_in_this_tree(
    package: Package, packages: dict[str, Package]
) -> None:
    siblings = {name: one for name, one in _declared(package).items() if name in packages}
    refused = [
        f"{requirement} refuses {packages[name].version}"
        for name, requirement in siblings.items()
        if not requirement.specifier.contains(packages[name].version)
    ]
    assert refused == []


def test_sibling_ranges_refuse_the_next_breaking_version(
    package: Package, packages: dict[str, Package]
) -> None:
    admitted = [
        str(requirement)
        for name, requirement in _declared(package).items()
        if name in packages and requirement.specifier.contains("0.2.0")
    ]
    assert admitted == []


def test_imports_are_declared(package: Package) -> None:
    declared = {name.replace("-", "_") for name in _declared(package)}
    own = {package.import_name, *OPTIONAL.get(package.name, set())}
    assert _imported(package.modules()) - FRAMEWORKS - declared - own == set()


def test_numpy_is_declared_where_the_pure_core_imports_it(package: Package) -> None:
    imports_it = "numpy" in _imported(package.modules(adapters=False))
    assert not imports_it or "numpy" in _declared(package)


def test_declared_siblings_are_imported(package: Package, packages: dict[str, Package]) -> None:
    imported = _imported(package.modules())
    if package.name == "hyper-parallel":  # re-exports by name, lazily
        imported |= set(re.findall(r"\bhp_\w+", "".join(p.read_text() for p in package.modules())))
    siblings = {one.import_name for name, one in packages.items() if name in _declared(package)}
    assert siblings - imported == set()


@pytest.mark.parametrize("extra", ["torch", "npu", "mindspore"])
def test_frameworks_are_extras_of_every_package(package: Package, extra: str) -> None:
    assert extra in package.project["optional-dependencies"]


def test_noxfile_lists_every_package(root: Path, packages: dict[str, Package]) -> None:
    tree = ast.parse((root / "noxfile.py").read_text())
    stack = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STACK"
    )
    assert sorted(stack) == sorted(packages)
