"""The torch adapter: our layouts to torch's DTensor and back."""

from hp_dtensor._torch.convert import (
    distribute_tensor,
    dtensor_from_local,
    from_torch_placement,
    is_dtensor,
    layout_of,
    local_of,
    to_torch_placement,
)

__all__ = [
    "distribute_tensor",
    "dtensor_from_local",
    "from_torch_placement",
    "is_dtensor",
    "layout_of",
    "local_of",
    "to_torch_placement",
]
