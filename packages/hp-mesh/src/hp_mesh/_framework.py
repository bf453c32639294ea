"""Which framework an object belongs to, found without importing any.

With several frameworks loaded the object decides; where there is none, the only one that is
loaded, or the one chosen with `use_framework`. There is no silent preference.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Literal, get_args

from hp_mesh.errors import FrameworkError

if TYPE_CHECKING:
    from types import ModuleType

Framework = Literal["torch", "mindspore"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
_chosen: list[Framework] = []


def framework_of(value: object) -> Framework | None:
    """Return the framework whose class the object is an instance of, or None.

    Example:
        >>> framework_of([1, 2]) is None
        True
    """
    for kind in type(value).__mro__:
        top = kind.__module__.partition(".")[0]
        if top in FRAMEWORKS and top in sys.modules:
            return top
    return None


def use_framework(name: Framework) -> None:
    """Choose the framework where no object tells.

    Raises:
        FrameworkError: The name is unknown.
    """
    if name not in FRAMEWORKS:
        raise FrameworkError(f"framework {name!r} isn't known. Pass one of {FRAMEWORKS}.")
    _chosen[:] = [name]


def current_framework() -> Framework:
    """Return the chosen framework, or the only one that is loaded.

    Raises:
        FrameworkError: None is loaded, or several are and none was chosen.
    """
    if _chosen:
        return _chosen[0]
    loaded = [name for name in FRAMEWORKS if name in sys.modules]
    if len(loaded) == 1:
        return loaded[0]
    found = " and ".join(loaded) or "none"
    raise FrameworkError(
        f"a framework is needed here, one of {FRAMEWORKS}; loaded: {found}. Import the one you "
        f"mean, or call hp_mesh.use_framework(name)."
    )


@functools.cache
def load_adapter(package: str, framework: Framework) -> ModuleType:
    """Import a package's adapter for a framework.

    Args:
        package: Import name of the package, for example "hp_mesh".
        framework: Which adapter.

    Raises:
        FrameworkError: The package has no adapter for it.
    """
    name = f"{package}._{framework}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise FrameworkError(
            f"{package} has no adapter for {framework} in this version. Use it with torch."
        ) from error
