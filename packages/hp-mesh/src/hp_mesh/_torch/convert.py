"""Our meshes to torch's DeviceMesh and back; groups are shared, never made twice.

Note [meshes known by identity]: `as_ours` is called for every DTensor that is looked at, so pairs
of meshes are remembered. They go by identity: torch's equality doesn't see which groups a mesh
has. Torch's objects carry no attribute of ours, since they are pickled with every DTensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hp_mesh.mesh import DeviceMesh

MAX_KNOWN = 64


class KnownMeshes:
    """Pairs of a torch mesh and ours, for one default process group at a time."""

    def __init__(self) -> None:
        self._default: object = None
        self._pairs: dict[int, tuple[TorchMesh, DeviceMesh]] = {}

    def find(self, theirs: TorchMesh) -> DeviceMesh | None:
        """Return our mesh of this very torch mesh, if it is remembered."""
        self._forget_stale()
        pair = self._pairs.get(id(theirs))
        return pair[1] if pair is not None else None

    def remember(self, theirs: TorchMesh, ours: DeviceMesh) -> None:
        """Keep a pair; both stay alive, so that the identity stays theirs."""
        self._forget_stale()
        if len(self._pairs) >= MAX_KNOWN:
            self._pairs.clear()
        self._pairs[id(theirs)] = theirs, ours

    def _forget_stale(self) -> None:
        default = dist.group.WORLD
        if default is not self._default:
            self._default, self._pairs = default, {}


KNOWN = KnownMeshes()


def is_torch_mesh(value: object) -> bool:
    """Tell whether this is torch's own mesh."""
    return isinstance(value, TorchMesh)


def as_ours(mesh: object, kind: type[DeviceMesh]) -> DeviceMesh:
    """Return a torch mesh as ours; `to_torch` gives the very same object back."""
    theirs = cast("TorchMesh", mesh)
    known = KNOWN.find(theirs)
    if known is not None:
        return known
    made = kind(theirs.device_type, theirs.mesh.tolist(), mesh_dim_names=theirs.mesh_dim_names)
    made._given_torch_mesh = theirs
    KNOWN.remember(theirs, made)
    return made


def make_torch_mesh(mesh: DeviceMesh) -> TorchMesh:
    """Return a torch mesh over our mesh's groups."""
    made = _slice_of_root(mesh)
    if made is None:
        made = _over_groups(mesh)
    KNOWN.remember(made, mesh)
    return made


def _slice_of_root(mesh: DeviceMesh) -> TorchMesh | None:
    names, root = mesh.mesh_dim_names, mesh.root_mesh
    if root is mesh or names is None or not set(names) <= set(root.axis_names):
        return None
    key = names[0] if len(names) == 1 else names
    return cast("TorchMesh", root.to_torch()[key])  # type: ignore[index]  # a torch mesh


def _over_groups(mesh: DeviceMesh) -> TorchMesh:
    names = mesh.mesh_dim_names
    groups = [cast("ProcessGroup", mesh.get_group(axis)) for axis in range(mesh.ndim)]
    ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").view(mesh.shape)
    if mesh.ndim == 1:  # torch wants the bare group then
        return TorchMesh.from_group(groups[0], mesh.device_type, mesh=ranks, mesh_dim_names=names)
    # torch insists on names for several groups; `KNOWN` finds the mesh without names again
    return TorchMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=names or mesh.axis_names
    )
