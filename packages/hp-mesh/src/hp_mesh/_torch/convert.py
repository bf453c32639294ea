"""Our meshes to torch's DeviceMesh and back; groups are shared, never made twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hp_mesh.mesh import DeviceMesh


def is_torch_mesh(value: object) -> bool:
    """Tell whether this is torch's own mesh."""
    return isinstance(value, TorchMesh)


def as_ours(mesh: object, kind: type[DeviceMesh]) -> DeviceMesh:
    """Return a torch mesh as ours; `to_torch` gives the very same object back."""
    theirs = cast("TorchMesh", mesh)
    made = kind(
        theirs.device_type,
        theirs.mesh.tolist(),
        mesh_dim_names=theirs.mesh_dim_names,
    )
    made._torch_mesh = theirs
    return made


def make_torch_mesh(mesh: DeviceMesh) -> TorchMesh:
    """Return a torch mesh over our mesh's groups."""
    names = mesh.mesh_dim_names
    root = mesh.root_mesh
    if root is not mesh and names is not None and all(name in root.axis_names for name in names):
        key = names[0] if len(names) == 1 else names
        return cast("TorchMesh", root.to_torch()[key])  # type: ignore[index]  # a torch mesh
    groups = [cast("ProcessGroup", mesh.get_group(axis)) for axis in range(mesh.ndim)]
    ranks = torch.tensor(mesh.ranks, dtype=torch.int, device="cpu").view(mesh.shape)
    if mesh.ndim == 1:  # torch wants the bare group then, and takes no name from a list
        return TorchMesh.from_group(groups[0], mesh.device_type, mesh=ranks, mesh_dim_names=names)
    return TorchMesh.from_group(
        groups, mesh.device_type, mesh=ranks, mesh_dim_names=names or mesh.axis_names
    )
