# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.10.14"]
# ///
"""Every check of this repository; `nox -l` lists them, `.ci/run` runs `tests`.

Environments are few and shared: making them costs more than most checks. `tools` has no package
of ours, `pure` has the six packages without a framework, `torch` has them with PyTorch, and
`wheel-X` has nothing but one built wheel and what it declares. An environment is made again only
when what goes into it has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nox
from nox.project import load_toml

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False

ROOT = Path(__file__).parent
STACK = (
    "hp-mesh",
    "hp-comm",
    "hp-dtensor",
    "hp-fully-shard",
    "hp-checkpoint",
    "hyper-parallel",
)
PACKAGES = [nox.param(name, id=name, tags=[name]) for name in STACK]
DIST = ROOT / "dist"
REPORTS = ROOT / ".nox" / "reports"
CONSTRAINTS = "constraints/tools.txt"
TEST_ENV = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine
    "PYTHONDONTWRITEBYTECODE": "1",
}
NUM_SLOWEST = 15


# --- environments ---------------------------------------------------------------------------


def _import_name(package: str) -> str:
    return package.replace("-", "_")


def _source(package: str) -> Path:
    return ROOT / "packages" / package / "src"


def _project(package: str) -> dict[str, object]:
    return load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]


def _siblings(package: str) -> list[str]:
    """Return the packages of this repository that `package` needs, itself first."""
    found = [package]
    for name in found:
        for requirement in _project(name)["dependencies"]:
            sibling = requirement.split(">")[0]
            if sibling in STACK and sibling not in found:
                found.append(sibling)
    return found


def _third_party(*extras: str) -> list[str]:
    """Return what all packages need from elsewhere, with the extras named."""
    needed: set[str] = set()
    for package in STACK:
        project = _project(package)
        needed.update(project["dependencies"])
        for extra in extras:
            needed.update(project["optional-dependencies"].get(extra, []))
    return sorted(one for one in needed if one.split(">")[0] not in STACK)


def _digest(installs: list[list[str]], files: list[Path]) -> str:
    groups = load_toml(ROOT / "pyproject.toml")["dependency-groups"]
    digest = hashlib.sha256(f"{sys.version} {ROOT} {installs} {groups}".encode())
    for path in [ROOT / CONSTRAINTS, *files]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment(
    session: nox.Session, name: str, installs: list[list[str]], files: list[Path]
) -> str:
    """Return the interpreter of a shared environment, made anew if its inputs changed.

    Args:
        session: Who asks; runs the commands.
        name: Folder below `.nox`.
        installs: Argument lists of `pip install`, in order.
        files: Files whose content decides whether the environment is still good.
    """
    folder = ROOT / ".nox" / f"env-{name}"
    python = str(folder / "bin" / "python")
    stamp = folder / "inputs.sha256"
    digest = _digest(installs, files)
    if stamp.exists() and stamp.read_text() == digest:
        return python
    session.run(sys.executable, "-m", "virtualenv", "--clear", "-q", str(folder), external=True)
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    session.run(*pip, "pip>=25.1", external=True)  # the first that knows --group
    for arguments in installs:
        session.run(*pip, "-c", CONSTRAINTS, *arguments, external=True)
    stamp.write_text(digest)
    return python


def _groups(*names: str) -> list[str]:
    return [f"--group={name}" for name in names]


def _tools(session: nox.Session) -> str:
    return _environment(session, "tools", [_groups("lint", "layers", "build")], [])


def _with_packages(session: nox.Session, name: str, *groups: str, extras: tuple[str, ...]) -> str:
    folders = [ROOT / "packages" / package for package in STACK]
    editable = [word for folder in folders for word in ("-e", str(folder))]
    return _environment(
        session,
        name,
        [
            [*_groups("editable", *groups), *_third_party(*extras)],
            ["--no-build-isolation", "--no-deps", *editable],
        ],
        [folder / "pyproject.toml" for folder in folders],
    )


def _pure(session: nox.Session) -> str:
    return _with_packages(session, "pure", "test", "cover", extras=())


def _torch(session: nox.Session) -> str:
    groups = ("test", "types", "layers", "build")
    return _with_packages(session, "torch", *groups, extras=("torch", "demo"))


def _report(session: str) -> str:
    """Return the name of the report of a session, for example "unit-hp-mesh"."""
    return session.replace("(", "-").removesuffix(")")


def _pytest(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pytest with the repository's settings and leave a report for `tests`."""
    report = _report(session.name)
    session.run(
        python,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--hypothesis-profile=ci", "--randomly-seed=1", f"--durations={NUM_SLOWEST}"),
        *("--durations-min=1.0", f"--junit-xml={REPORTS / report}.xml"),
        *arguments,
        *session.posargs,
        env=TEST_ENV,
        external=True,
    )


# --- fast checks ----------------------------------------------------------------------------


@nox.session(tags=["fast", "ci"])
def lint(session: nox.Session) -> None:
    """Style, formatting and spelling (ruff, codespell)."""
    python = _tools(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(python, "-m", "codespell_lib", *session.posargs, external=True)


@nox.session(tags=["fast", "ci"])
def layers(session: nox.Session) -> None:
    """Imports run downwards only and pure cores see no framework (import-linter)."""
    python = _tools(session)
    # The sources by path: an installed copy would be checked instead, and stay green.
    env = {"PYTHONPATH": os.pathsep.join(str(_source(package)) for package in STACK)}
    command = str(Path(python).with_name("lint-imports"))
    session.run(command, "--no-cache", *session.posargs, env=env, external=True)


@nox.session(tags=["fast", "ci"])
def types(session: nox.Session) -> None:
    """Types of all sources (mypy --strict)."""
    session.run(_torch(session), "-m", "mypy", *session.posargs, external=True)


@nox.session(tags=["fast", "ci"])
@nox.parametrize("package", PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Framework-free tests and doctests of one package, from its sources."""
    folder = f"packages/{package}"
    _pytest(
        session,
        _pure(session),
        *("--doctest-modules", f"{folder}/src", f"{folder}/tests"),
        *("--ignore-glob=*/_torch/*", "--ignore-glob=*/tests/torch/*"),
        *("--ignore-glob=*/_mindspore/*", "--ignore-glob=*/tests/mindspore/*"),
    )


# --- built packages -------------------------------------------------------------------------


@nox.session(default=False, tags=["ci"])
def build(session: nox.Session) -> None:
    """Wheel and source archive of every package, into dist/."""
    python = _tools(session)
    shutil.rmtree(DIST, ignore_errors=True)
    for package in STACK:
        with session.chdir(ROOT / "packages" / package):
            session.run(python, "-m", "hatch", "-q", "build", str(DIST), external=True)


@nox.session(default=False, tags=["ci"], requires=["build"])
@nox.parametrize("package", PACKAGES)
def wheel(session: nox.Session, package: str) -> None:
    """One built wheel alone, with what it declares: its framework-free tests, elsewhere."""
    wheels = [next(DIST.glob(f"{_import_name(one)}-*.whl")) for one in _siblings(package)]
    python = _environment(
        session, f"wheel-{package}", [_groups("test"), [str(path) for path in wheels]], wheels
    )
    folder = Path(session.create_tmp()).resolve() / package
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns("torch", "mindspore", "__pycache__")
    shutil.copytree(ROOT / "packages" / package / "tests", folder / "tests", ignore=skipped)
    name = _import_name(package)
    check = (
        f"import sys, {name}; found = {{'torch', 'mindspore'}} & set(sys.modules); "
        f"assert not found, found; assert 'env-wheel-{package}' in {name}.__file__"
    )
    with session.chdir(folder):
        session.run(python, "-c", check, external=True)
        settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder))
        _pytest(session, python, *settings, str(folder / "tests"))


# --- with a framework -----------------------------------------------------------------------


@nox.session(default=False, tags=["ci"])
def torch(session: nox.Session) -> None:
    """Tests and doctests of all packages that need PyTorch (real ranks on this machine)."""
    tests = sorted(str(path) for path in ROOT.glob("packages/*/tests/torch"))
    sources = [str(_source(package)) for package in STACK]
    _pytest(session, _torch(session), "--doctest-modules", *sources, *tests)


@nox.session(default=False, tags=["ci"])
def integration(session: nox.Session) -> None:
    """Tests of several packages together, of the built files and of the house rules."""
    _pytest(session, _torch(session), "tests/integration", "tests/packaging")


@nox.session(default=False, tags=["ci"])
def docs(session: nox.Session) -> None:
    """Run the code of READMEs and docs, and follow their links."""
    _pytest(session, _torch(session), "tests/docs")


@nox.session(default=False)
def stress(session: nox.Session) -> None:
    """The whole of the long lists (kills, damaged files, schedules) of which CI runs a sample."""
    _pytest(session, _torch(session), "-m", "stress", "--timeout=1200", "packages")


@nox.session(default=False)
def cover(session: nox.Session) -> None:
    """Branch coverage of the sources by the framework-free tests."""
    folders = [f"packages/{package}/tests" for package in STACK]
    skipped = ("--ignore-glob=*/tests/torch/*", "--ignore-glob=*/tests/mindspore/*")
    options = ("--cov", "--cov-config=pyproject.toml", "--cov-report=term")
    _pytest(session, _pure(session), *options, *skipped, *folders)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small GPT on real text, stop, resume on other ranks (arguments after --)."""
    command = str(Path(_torch(session)).with_name("hyper-parallel"))
    session.run(command, "demo", *session.posargs, external=True)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Time of a training step against FSDP2, DDP and no communication (arguments after --)."""
    python = _torch(session)
    script = "benchmarks/step_time.py"
    if session.posargs:
        session.run(python, script, *session.posargs, env=TEST_ENV, external=True)
        return
    for config in ("A", "B"):
        for transport in ("shm", "gloo"):
            arguments = ("--world", "2", "--config", config, "--transport", transport)
            session.run(python, script, *arguments, env=TEST_ENV, external=True)


# --- all that CI runs -----------------------------------------------------------------------

CI = (
    "lint",
    "layers",
    "types",
    *(f"unit({package})" for package in STACK),
    "build",
    *(f"wheel({package})" for package in STACK),
    "torch",
    "integration",
    "docs",
)


@nox.session(default=False, requires=CI)
def tests(session: nox.Session) -> None:
    """All that CI runs, in order; ends with the slowest tests and the counts."""
    cases = []
    for name in CI:
        path = REPORTS / f"{_report(name)}.xml"
        if path.exists():
            cases += [(name, case) for case in ET.parse(path).getroot().iter("testcase")]
    skipped = sum(case.find("skipped") is not None for _, case in cases)
    slowest = sorted(cases, key=lambda item: -float(item[1].get("time", "0")))[:NUM_SLOWEST]
    print(f"The {len(slowest)} slowest tests:")
    for name, case in slowest:
        test = f"{case.get('classname')}::{case.get('name')}"
        print(f"  {float(case.get('time', '0')):6.1f} s  {name}: {test}")
    print(f"{len(cases) - skipped} passed, 0 failed, {skipped} skipped")
