"""Where things lie in this repository, as fixtures."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
ADAPTERS = ("_torch", "_mindspore")


@dataclass(frozen=True)
class Package:
    """One package of this repository."""

    name: str
    """As in `pip install`."""

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.import_name

    @property
    def project(self) -> dict[str, object]:
        table: dict[str, object] = tomllib.loads((self.folder / "pyproject.toml").read_text())
        return table["project"]

    @property
    def version(self) -> str:
        tree = ast.parse((self.source / "_version.py").read_text())
        assigned = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        return str(ast.literal_eval(assigned[0]))

    def modules(self, *, adapters: bool = True) -> list[Path]:
        """Return the package's source files; without adapters, only the pure ones."""
        found = sorted(self.source.rglob("*.py"))
        return [path for path in found if adapters or not set(ADAPTERS) & set(path.parts)]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(params=DISTRIBUTIONS)
def package(request: pytest.FixtureRequest) -> Package:
    return Package(request.param)


@pytest.fixture
def packages() -> dict[str, Package]:
    return {name: Package(name) for name in DISTRIBUTIONS}
