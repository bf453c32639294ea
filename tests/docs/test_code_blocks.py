"""The code of READMEs and docs runs as it stands, and their links lead somewhere.

A block opened by ```python runs as a script of its own; `ranks=N` after it runs it by torchrun on
N ranks. A block opened by ```pycon is a doctest. Other blocks are only read for `nox -s`.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "packages/*/*.md", "docs/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
SESSION = re.compile(r"nox (?:-s|-t) \"?([\w-]+)")
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    options: str
    code: str

    @property
    def label(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def num_ranks(self) -> int:
        found = re.search(r"ranks=(\d+)", self.options)
        return int(found.group(1)) if found else 0


def _blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[1], match[2], match[3]))
    return [block for block in found if block.language == language]


def _command(block: Block, script: Path) -> list[str]:
    if not block.num_ranks:
        return [sys.executable, str(script)]
    launcher = ("-m", "torch.distributed.run", "--standalone")
    return [sys.executable, *launcher, f"--nproc-per-node={block.num_ranks}", str(script)]


@pytest.mark.timeout(120)  # launching ranks takes long on a busy machine
@pytest.mark.parametrize("block", _blocks("python"), ids=lambda block: block.label)
def test_python_block_runs(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code)
    result = subprocess.run(
        _command(block, script),
        cwd=tmp_path,
        env={**os.environ, **ENV},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", _blocks("pycon"), ids=lambda block: block.label)
def test_pycon_block_shows_the_truth(block: Block) -> None:
    test = doctest.DocTestParser().get_doctest(block.code, {}, block.label, str(block.page), 0)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed = runner.run(test, out=output.append).failed
    assert failed == 0, "".join(output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sessions_named_exist(page: Path) -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    sessions = set(re.findall(r"^def (\w+)\(session", noxfile, re.MULTILINE))
    tags = {"fast", "ci", *(path.name for path in ROOT.glob("packages/*"))}
    named = set(SESSION.findall(page.read_text()))
    assert {name for name in named if name.split("(")[0] not in sessions | tags} == set()


def test_readme_states_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "python3 -m pip install nox && python3 -m nox -s demo" in text
    assert "python3 -m pip install nox && python3 -m nox -s tests" in text


def test_ci_runs_the_readme_command() -> None:
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert last == "python3 -m pip install nox && python3 -m nox -s tests"
