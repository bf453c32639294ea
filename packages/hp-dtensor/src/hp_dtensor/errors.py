"""The errors of hp_dtensor.

error             raised when
LayoutError       placements don't fit the mesh or the tensor
PlacementError    a placement of another library has no counterpart here
"""

from __future__ import annotations


class LayoutError(ValueError):
    """Placements don't fit the mesh or the tensor; nothing was made."""


class PlacementError(LayoutError, NotImplementedError):
    """A placement of another library has no counterpart in this version."""
