"""The errors of hp_mesh.

Each is a `MeshError` (a ValueError), and also the built-in class that users of torch's DeviceMesh
catch in the same situation.

    error               raised when
    MeshError           sizes, names or ranks don't fit together
    MeshIndexError      an index is outside an axis
    MeshKeyError        an axis name isn't in the mesh
    MeshTypeError       an argument has the wrong type
    MeshStateError      process groups or this process's rank are needed and not there
    FrameworkError      it can't be told which framework is meant
"""

from __future__ import annotations


class MeshError(ValueError):
    """Sizes, names or ranks don't fit together; nothing was made."""


class MeshIndexError(MeshError, IndexError):
    """An index is outside its axis."""


class MeshKeyError(MeshError, KeyError):
    """An axis name isn't in the mesh; the message lists those that are."""

    def __str__(self) -> str:
        """Return the message as it is (KeyError would quote it)."""
        return str(self.args[0]) if self.args else ""


class MeshTypeError(MeshError, TypeError):
    """An argument has the wrong type."""


class MeshStateError(MeshError, RuntimeError):
    """Process groups or this process's rank are needed and aren't there."""


class FrameworkError(MeshError, RuntimeError):
    """It can't be told which framework is meant; says how to say it."""
