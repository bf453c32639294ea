"""hp_mesh: grids of ranks with named axes, and the boxes that tensors are cut into."""

from hp_mesh._framework import use_framework
from hp_mesh._version import __version__
from hp_mesh.abstract import AbstractMesh
from hp_mesh.box import Box, shard_bounds
from hp_mesh.errors import (
    FrameworkError,
    MeshError,
    MeshIndexError,
    MeshKeyError,
    MeshStateError,
    MeshTypeError,
)
from hp_mesh.layout import MeshLayout
from hp_mesh.mesh import DeviceMesh, as_device_mesh, init_device_mesh

__all__ = [
    "AbstractMesh",
    "Box",
    "DeviceMesh",
    "FrameworkError",
    "MeshError",
    "MeshIndexError",
    "MeshKeyError",
    "MeshLayout",
    "MeshStateError",
    "MeshTypeError",
    "__version__",
    "as_device_mesh",
    "init_device_mesh",
    "shard_bounds",
    "use_framework",
]
