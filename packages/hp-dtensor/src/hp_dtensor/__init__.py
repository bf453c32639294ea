"""hp_dtensor: which rank holds which box of a tensor, and torch's DTensor made from that."""

from hp_dtensor._version import __version__
from hp_dtensor.api import (
    box_of,
    distribute_tensor,
    dtensor_from_local,
    from_torch_placement,
    is_dtensor,
    layout_of,
    local_of,
    to_torch_placement,
)
from hp_dtensor.errors import LayoutError, PlacementError
from hp_dtensor.layout import Layout
from hp_dtensor.placement import Placement, Replicate, Shard

__all__ = [
    "Layout",
    "LayoutError",
    "Placement",
    "PlacementError",
    "Replicate",
    "Shard",
    "__version__",
    "box_of",
    "distribute_tensor",
    "dtensor_from_local",
    "from_torch_placement",
    "is_dtensor",
    "layout_of",
    "local_of",
    "to_torch_placement",
]
