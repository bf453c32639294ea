"""Our layouts to torch's DTensor and back.

Note [global shape]: torch can't know the whole size of an unevenly cut tensor from one rank's
piece, so it is always given; then nothing has to be communicated.

Note [plans by mesh identity]: gradients become DTensors at every step, so what depends on mesh,
placements and shape alone is worked out once. Equal meshes of torch may belong to different
process groups, in which this process has another rank: a plan counts for one mesh object.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
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

    from hp_mesh import DeviceMesh

MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a DTensor of one mesh, placements and shape is made with."""

    mesh: weakref.ref[TorchMesh]
    placements: tuple[TorchPlacement, ...]
    local_shape: tuple[int, ...]
    shape: torch.Size
    stride: tuple[int, ...]


_plans: dict[tuple[int, tuple[Placement, ...], tuple[int, ...]], _Plan] = {}


def is_dtensor(value: object) -> bool:
    """Tell whether the object is torch's DTensor."""
    return isinstance(value, DTensor)


def to_torch_placement(placement: Placement) -> TorchPlacement:
    """Return torch's placement for ours."""
    if isinstance(placement, Shard):
        return torch_tensor.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return torch_tensor.Replicate()
    raise _no_placement(placement)


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
    _check_plain(local)
    ours = as_device_mesh(mesh)
    torch_mesh = cast("TorchMesh", ours.to_torch())
    plan = _plan(ours, torch_mesh, _ours(placements), tuple(shape))
    if local.shape != plan.local_shape:
        raise LayoutError(
            f"this rank's piece has the shape {tuple(local.shape)}; {tuple(placements)} over "
            f"{ours!r} gives it {plan.local_shape} of a tensor of shape {tuple(shape)}. Pass that "
            f"piece, or the right global shape."
        )
    if stride is not None and len(stride) != len(plan.shape):
        raise LayoutError(
            f"the strides {tuple(stride)} were given for a tensor of shape {tuple(shape)}. Pass "
            f"one per dim, or None where it is contiguous."
        )
    return DTensor.from_local(
        local,
        torch_mesh,
        plan.placements,
        run_check=False,
        shape=plan.shape,
        stride=tuple(stride) if stride is not None else plan.stride,
    )


def _plan(
    mesh: DeviceMesh,
    torch_mesh: TorchMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
) -> _Plan:
    """See Note [plans by mesh identity]."""
    key = id(torch_mesh), placements, shape
    known = _plans.get(key)
    if known is not None and known.mesh() is torch_mesh:
        return known
    layout = Layout(mesh, placements)
    made = _Plan(
        mesh=weakref.ref(torch_mesh),
        placements=tuple(map(to_torch_placement, layout.normalized(shape))),
        local_shape=layout.local_box(shape).sizes,
        shape=torch.Size(shape),
        stride=_contiguous(shape),
    )
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = made
    return made


def distribute_tensor(full: torch.Tensor, mesh: object, placements: Sequence[object]) -> DTensor:
    """Cut this rank's piece out of a tensor that every rank holds."""
    _check_plain(full)
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
            raise _no_placement(placement)
        found.append(ours)
    return tuple(found)


def _check_plain(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise LayoutError(
            f"a plain tensor was expected and a DTensor was found, placed {tensor.placements}. "
            f"Pass its local_of, or redistribute it."
        )


def _no_placement(found: object) -> LayoutError:
    return LayoutError(
        f"{found!r} isn't a placement. Pass hp_dtensor.Shard(dim) or Replicate(), or torch's."
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, s) for s in shape[dim + 1 :]) for dim in range(len(shape)))
