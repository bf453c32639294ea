"""Make the folder of a new package and enter it wherever packages are listed.

    python tools/new_package.py hp-data --above hp-comm --says "Feeds ranks with data."

The package gets a layer of its own, right above the one named. Nothing is written if anything
is wrong with the arguments.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

LISTS = ("noxfile.py", "pyproject.toml")
NAME = re.compile(r"hp-[a-z][a-z0-9]*(-[a-z0-9]+)*")
VERSION = '''"""The version of this package; the only place that states it."""

__version__ = "0.1.0"
'''
ENTRANCE = '''"""{imported}: {says}"""

from {imported}._version import __version__

__all__ = ["__version__"]
'''
FIRST_TEST = '''"""The package says which version it is."""

import {imported}


def test_version_of_a_new_package_is_the_first() -> None:
    assert {imported}.__version__ == "0.1.0"
'''


class NewPackageError(ValueError):
    """The package can't be made; nothing was written."""


def make_package(root: Path, name: str, *, above: str, says: str) -> list[Path]:
    """Write the new package and its entries.

    Args:
        root: Top folder of the repository.
        name: Name of the distribution, for example "hp-data".
        above: The package of the layer right below.
        says: What it is good for, in one sentence.

    Returns:
        The files written or changed.

    Raises:
        NewPackageError: The name is taken or no name, or there is no package `above`.
    """
    folder = root / "packages" / name
    if not NAME.fullmatch(name):
        raise NewPackageError(f"{name!r} is no package name here: use one like 'hp-data'.")
    if folder.exists():
        raise NewPackageError(f"{name!r} is there already: {folder}. Choose another name.")
    if not (root / "packages" / above / "pyproject.toml").exists():
        found = sorted(path.parent.name for path in root.glob("packages/*/pyproject.toml"))
        raise NewPackageError(f"no package {above!r} to stand above; there are {found}.")
    changed = {root / path: _with_entries((root / path).read_text(), name, above) for path in LISTS}
    written = _write_skeleton(root, name, above=above, says=says)
    for path, text in changed.items():
        path.write_text(text)
    return [*written, *changed]


def _with_entries(text: str, name: str, above: str) -> str:
    """Return `text` with an entry for `name` beside every entry of `above`.

    Lists run from the bottom up, but `layers` from the top down.
    """
    lines = []
    opened = ""
    for line in text.splitlines(keepends=True):
        opening = re.match(r"(\w+) = [\[(]", line)
        opened = opening[1] if opening else opened
        entry = _entry(line, name, above)
        lines += [entry, line] if opened == "layers" else [line, entry]
    return "".join(lines)


def _entry(line: str, name: str, above: str) -> str:
    """Return the new line for a line that lists `above`, or nothing."""
    module = above.replace("-", "_")
    if re.fullmatch(rf'\s+"({above}|packages/{above}/src)",\n', line):
        return line.replace(above, name)
    if re.fullmatch(rf'\s+"(\w+ \| )*{module}( \| \w+)*",\n', line):
        return re.sub(r'"[^"]*"', '"' + name.replace("-", "_") + '"', line)
    return ""


def _write_skeleton(root: Path, name: str, *, above: str, says: str) -> list[Path]:
    folder = root / "packages" / name
    imported = name.replace("-", "_")
    source = folder / "src" / imported
    pattern = root / "packages" / "hp-mesh" / "pyproject.toml"
    project = pattern.read_text().replace("hp-mesh", name).replace("hp_mesh", imported)
    project = re.sub(r'description = ".*"', f'description = "{says}"', project)
    requirement = f'dependencies = ["{above}>=0.1,<0.2"]'
    texts = {
        folder / "pyproject.toml": project.replace("dependencies = []", requirement),
        folder / "README.md": f"# {name}\n\n{says}\n",
        folder / "CHANGELOG.md": (root / "packages" / "hp-mesh" / "CHANGELOG.md")
        .read_text()
        .replace("hp-mesh", name),
        folder / "changes" / ".gitkeep": "",
        source / "__init__.py": ENTRANCE.format(imported=imported, says=says),
        source / "_version.py": VERSION,
        source / "py.typed": "",
        folder / "tests" / "test_version.py": FIRST_TEST.format(imported=imported),
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(root / "LICENSE", folder / "LICENSE")
    return [*texts, folder / "LICENSE"]


def main() -> int:
    """Run the command; 2 on wrong use."""
    parser = argparse.ArgumentParser(description="Make the folder of a new package.")
    parser.add_argument("name", help="for example hp-data")
    parser.add_argument("--above", required=True, help="package of the layer right below")
    parser.add_argument("--says", required=True, help="what it is good for, in one sentence")
    arguments = parser.parse_args()
    root = Path(__file__).parents[1]
    try:
        written = make_package(root, arguments.name, above=arguments.above, says=arguments.says)
    except NewPackageError as error:
        print(f"new_package: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path.relative_to(root)) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
