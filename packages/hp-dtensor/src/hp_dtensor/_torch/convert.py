"""Our layouts to torch's DTensor and back.

Note [global shape]: torch can't know the whole size of an unevenly cut tensor from one rank's
piece, so it is always given; then nothing has to be communicated.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed import tensor as torch_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from hp_dtensor.errors import LayoutError, PlacementError
from hp_dtensor.layout import Layout
from hp_dtensor.placement import Placement, Replicate, Shard
from hp_mesh import as_device_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


def is_dtensor(value: object) -> bool:
    """Tell whether the object is torch's DTensor."""
    return isinstance(value, DTensor)


def to_torch_placement(placement: Placement) -> TorchPlacement:
    """Return torch's placement for ours."""
    if isinstance(placement, Shard):
        return torch_tensor.Shard(placement.dim)
    return torch_tensor.Replicate()


def from_torch_placement(placement: object) -> Placement | None:
    """Return our placement for torch's; None where it isn't a placement of torch."""
    if type(placement) is torch_tensor.Shard:
        return Shard(placement.dim)
    if isinstance(placement, torch_tensor.Replicate):
        return Replicate()
    if isinstance(placement, TorchPlacement):
        raise PlacementError(
            f"torch's placement {placement!r} has no counterpart in this version. Redistribute "
            f"the DTensor to Shard and Replicate first."
        )
    return None


def dtensor_from_local(
    local: torch.Tensor,
    mesh: object,
    placements: Sequence[object],
    *,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Return a DTensor over this rank's piece; see Note [global shape]."""
    layout = Layout(as_device_mesh(mesh), _ours(placements))
    box = layout.local_box(shape)
    if tuple(local.shape) != box.sizes:
        raise LayoutError(
            f"this rank's piece has the shape {tuple(local.shape)}; {layout.placements} over "
            f"{layout.mesh!r} gives it {box.sizes} of a tensor of shape {tuple(shape)}. Pass that "
            f"piece, or the right global shape."
        )
    return DTensor.from_local(
        local,
        cast("TorchMesh", as_device_mesh(mesh).to_torch()),
        [to_torch_placement(placement) for placement in layout.normalized(shape)],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride) if stride is not None else _contiguous(shape),
    )


def distribute_tensor(full: torch.Tensor, mesh: object, placements: Sequence[object]) -> DTensor:
    """Cut this rank's piece out of a tensor that every rank holds."""
    shape = tuple(full.shape)
    layout = Layout(as_device_mesh(mesh), _ours(placements))
    local = full.detach()[layout.local_box(shape).slices()].clone(
        memory_format=torch.contiguous_format
    )
    made = dtensor_from_local(local, mesh, placements, shape=shape)
    made.requires_grad_(full.requires_grad)
    return made


def layout_of(dtensor: DTensor) -> Layout:
    """Return the mesh and placements of a DTensor."""
    return Layout(as_device_mesh(dtensor.device_mesh), _ours(dtensor.placements))


def local_of(dtensor: DTensor) -> torch.Tensor:
    """Return this rank's piece: the very memory, outside autograd."""
    return dtensor._local_tensor


def _ours(placements: Sequence[object]) -> tuple[Placement, ...]:
    found = []
    for placement in placements:
        ours = placement if isinstance(placement, Placement) else from_torch_placement(placement)
        if ours is None:
            raise LayoutError(f"{placement!r} isn't a placement. Pass Shard(dim) or Replicate().")
        found.append(ours)
    return tuple(found)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, s) for s in shape[dim + 1 :]) for dim in range(len(shape)))
