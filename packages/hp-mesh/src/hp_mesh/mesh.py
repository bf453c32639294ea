"""Grids of ranks with named axes: which ranks are where, and which form a group.

`AbstractMesh` is shape and names only. `DeviceMesh` adds the device type, the ranks and process
groups, which are made at first use. All arithmetic is in `layout.py`.

Source: torch's DeviceMesh (names of methods); JAX's split in an abstract and a real mesh.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_mesh._framework import load_adapter
from hp_mesh.check import check_device_type, check_names, check_shape, flat_ranks
from hp_mesh.errors import MeshError, MeshKeyError, MeshStateError, MeshTypeError
from hp_mesh.groups import REGISTRY, own_rank, runtime
from hp_mesh.layout import MeshLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_mesh._framework import Framework

MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class AbstractMesh:
    """Shape and axis names of a grid of ranks; no ranks, no network.

    Example:
        >>> AbstractMesh((2, 4), ("dp", "tp")).size("tp")
        4
    """

    shape: tuple[int, ...]
    """Number of ranks along each axis."""

    axis_names: tuple[str, ...]
    """Name of each axis."""

    def __post_init__(self) -> None:
        check_shape(self.shape)
        check_names(self.axis_names, len(self.shape))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, of the whole mesh or along one axis."""
        return math.prod(self.shape) if axis is None else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: str | int) -> int:
        """Return the position of an axis given by name or number.

        Raises:
            MeshKeyError: The mesh has no such axis.
        """
        if isinstance(axis, str) and axis in self.axis_names:
            return self.axis_names.index(axis)
        if isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise MeshKeyError(
            f"axis {axis!r} isn't in this mesh: it has {self.axis_names} with sizes {self.shape}. "
            f"Pass one of the names, or a number in [0, {self.ndim})."
        )


class DeviceMesh:
    """A grid of ranks with process groups along its axes.

    Args:
        device_type: "cpu", "cuda" or "npu".
        mesh: Global ranks as nested lists, an array or a tensor; None: all ranks on one axis.
        mesh_dim_names: One name per axis; None: axes are given by number.

    Raises:
        MeshError: Sizes, names or ranks don't fit together.
        MeshTypeError: `mesh` is of a wrong type.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh.ranks
        ((2, 2), (0, 1, 2, 3))
    """

    def __init__(
        self,
        device_type: str,
        mesh: object | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        check_device_type(device_type)
        if mesh is None:
            mesh = range(runtime().world_size())
        shape, ranks = flat_ranks(mesh)
        names = check_names(mesh_dim_names, len(shape))
        self._setup(device_type, MeshLayout.dense(shape), names, root_ranks=ranks)

    def _setup(
        self,
        device_type: str,
        layout: MeshLayout,
        names: tuple[str, ...] | None,
        *,
        root_ranks: Sequence[int],
        root: DeviceMesh | None = None,
        offset: int = 0,
    ) -> None:
        self.device_type = device_type
        self.mesh_dim_names = names
        self._layout = layout
        self._offset = offset
        self._root_ranks = root_ranks
        self._root = root
        self._torch_mesh: object = None
        self._flattened: dict[str, DeviceMesh] = {}

    @property
    def root_mesh(self) -> DeviceMesh:
        """The mesh that this one was cut out of; itself if none."""
        return self._root or self

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each axis."""
        return self._layout.sizes

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes; "0", "1", ... where none were given."""
        return self.mesh_dim_names or tuple(map(str, range(self.ndim)))

    @property
    def abstract(self) -> AbstractMesh:
        """Shape and names alone."""
        return AbstractMesh(self.shape, self.axis_names)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in row-major order; as long as the mesh is big."""
        return tuple(self._root_ranks[self._offset + p] for p in self._layout.positions())

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return own_rank()

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, of the whole mesh or along one axis."""
        return self.abstract.size(axis)

    def axis_index(self, axis: str | int) -> int:
        """Return the position of an axis given by name or number."""
        return self.abstract.axis_index(axis)

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this process's position on each axis, or None if it isn't in the mesh."""
        rank = self.rank
        if rank not in self._root_ranks:
            return None
        return self._layout.coordinate(self._root_ranks.index(rank) - self._offset)

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """Return this process's position along one axis.

        Args:
            axis: Which one; may be left out where there is only one.

        Raises:
            MeshError: The axis is left out and there are several.
            MeshStateError: This process isn't in the mesh.
        """
        return self._own_coordinate()[self._single(axis)]

    def ranks_along(self, axis: str | int | None = None) -> tuple[int, ...]:
        """Return the global ranks of the line along one axis that this process is on.

        Args:
            axis: Which one; may be left out where there is only one.
        """
        index = self._single(axis)
        coordinate = list(self._own_coordinate())
        coordinate[index] = 0
        start = self._offset + self._layout.position(coordinate)
        stride = self._layout.strides[index]
        return tuple(self._root_ranks[start + step * stride] for step in range(self.shape[index]))

    def get_group(self, axis: str | int | None = None) -> object:
        """Return the framework's process group along one axis, made at first use.

        Every rank of the mesh must ask for a group of it at some time; which axis first doesn't
        matter.

        Args:
            axis: Which one; may be left out where there is only one.
        """
        index = self._single(axis)
        if self._torch_mesh is not None:
            return self._torch_mesh.get_group(index)  # type: ignore[attr-defined]  # torch's mesh
        self._make_all_groups()
        return REGISTRY.get(runtime(), self.ranks_along(index))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of these axes on which this process lies.

        Args:
            names: One axis name, or several in the order of this mesh.

        Raises:
            MeshKeyError: A name isn't in the mesh.
            MeshError: No names, a name twice, or another order than the mesh's.
            MeshTypeError: Not a name or a tuple of names.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise MeshTypeError(
                f"mesh[...] takes an axis name or a tuple of them; it got {names!r}."
            )
        flat = self.root_mesh._flattened
        if len(wanted) == 1 and wanted[0] in flat and wanted[0] not in self.axis_names:
            return flat[wanted[0]]
        if self.mesh_dim_names is None:
            raise MeshStateError(
                f"mesh[{names!r}] needs axis names and this mesh has none. Pass mesh_dim_names "
                f"when it is made."
            )
        axes = [self.axis_index(name) for name in wanted]
        if not axes or axes != sorted(set(axes)):
            raise MeshError(
                f"mesh[{names!r}] doesn't name axes in the order of the mesh, which has "
                f"{self.axis_names}. Name each once, in this order."
            )
        if axes == list(range(self.ndim)):
            return self
        return self._cut(self._layout.select(axes), wanted, axes)

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """Return all axes as one; the same axes under the same name give the same mesh.

        Args:
            name: Of the new axis; None: the names joined by "_". The root mesh knows it after
                this, so `root[name]` works.

        Raises:
            MeshError: The name is an axis of the root or was given to other axes.
        """
        name = name or "_".join(self.axis_names)
        if self.ndim == 1 and self.axis_names == (name,):
            return self
        known = self.root_mesh._flattened.get(name)
        made = self._cut(self._layout.flatten(), (name,), list(range(self.ndim)))
        if known is not None and known == made:
            return known
        if known is not None or name in self.root_mesh.axis_names:
            raise MeshError(
                f"the axes {self.axis_names} can't be flattened to {name!r}: the root mesh has "
                f"that name already, for other ranks. Choose another name."
            )
        self.root_mesh._flattened[name] = made
        return made

    def to_torch(self) -> object:
        """Return torch's DeviceMesh over the same groups; the same object each time."""
        if self._torch_mesh is None:
            self._torch_mesh = load_adapter("hp_mesh", "torch").make_torch_mesh(self)
        return self._torch_mesh

    @classmethod
    def from_torch(cls, mesh: object) -> DeviceMesh:
        """Return a torch DeviceMesh as ours; `to_torch` gives the very same object back."""
        made: DeviceMesh = load_adapter("hp_mesh", "torch").as_ours(mesh, cls)
        return made

    def _cut(self, layout: MeshLayout, names: tuple[str, ...], kept_axes: list[int]) -> DeviceMesh:
        coordinate = self._own_coordinate()
        rest = [0 if axis in kept_axes else c for axis, c in enumerate(coordinate)]
        made = DeviceMesh.__new__(DeviceMesh)
        made._setup(
            self.device_type,
            layout,
            names,
            root_ranks=self._root_ranks,
            root=self.root_mesh,
            offset=self._offset + self._layout.position(rest),
        )
        return made

    def _make_all_groups(self) -> None:
        """See Note [one order for all groups]."""
        root = self.root_mesh
        for axis in range(root.ndim):
            REGISTRY.get(runtime(), root.ranks_along(axis))

    def _own_coordinate(self) -> tuple[int, ...]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshStateError(
                f"rank {self.rank} isn't in this mesh of ranks {self._shown_ranks()}. Only "
                f"members may ask for their position or groups."
            )
        return coordinate

    def _single(self, axis: str | int | None) -> int:
        if axis is None and self.ndim != 1:
            raise MeshStateError(
                f"this mesh has the axes {self.axis_names}; say which one is meant."
            )
        return self.axis_index(0 if axis is None else axis)

    def _shown_ranks(self) -> str:
        first = itertools.islice(self._layout.positions(), MAX_RANKS_SHOWN)
        shown = ", ".join(str(self._root_ranks[self._offset + place]) for place in first)
        return f"[{shown}{', ...' if self.size() > MAX_RANKS_SHOWN else ''}]"

    def _same_place(self, other: DeviceMesh) -> bool:
        if self._root_ranks is other._root_ranks:
            mine, theirs = (self._layout, self._offset), (other._layout, other._offset)
            if mine == theirs:
                return True
        return self.shape == other.shape and self.ranks == other.ranks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        mine = (self.device_type, self.mesh_dim_names)
        return mine == (other.device_type, other.mesh_dim_names) and self._same_place(other)

    def __hash__(self) -> int:
        first = self._root_ranks[self._offset]
        return hash((self.device_type, self.shape, self.mesh_dim_names, first))

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True)
        )
        return f"DeviceMesh({self.device_type!r}, {axes}, ranks={self._shown_ranks()})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
) -> DeviceMesh:
    """Return a mesh over all ranks of the job, in order.

    Makes the default process group if there is none and the launcher's environment variables
    are set.

    Args:
        device_type: "cpu", "cuda" or "npu".
        mesh_shape: Number of ranks along each axis; the product is the number of processes.
        mesh_dim_names: One name per axis.

    Raises:
        MeshError: Sizes or names don't fit together, or the product isn't the number of ranks.
    """
    check_device_type(device_type)
    shape = check_shape(tuple(mesh_shape))
    names = check_names(mesh_dim_names, len(shape))
    count = math.prod(shape)
    _check_world(device_type, shape, count)
    made = DeviceMesh.__new__(DeviceMesh)
    made._setup(device_type, MeshLayout.dense(shape), names, root_ranks=range(count))
    return made


def _check_world(device_type: str, shape: tuple[int, ...], count: int) -> None:
    if "torch" not in sys.modules:
        return  # pure use: plans of jobs that run elsewhere
    groups = runtime()
    if not groups.is_initialized():
        groups.initialize(device_type)
    if count != groups.world_size():
        raise MeshStateError(
            f"a mesh of shape {shape} has {count} ranks and the job has {groups.world_size()}. "
            f"Pass sizes whose product is the number of processes, or DeviceMesh(device_type, "
            f"ranks) for a part of them."
        )


def as_device_mesh(mesh: object) -> DeviceMesh:
    """Return our mesh for ours or torch's.

    Raises:
        MeshTypeError: It is neither.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    framework: Framework = "torch"
    if framework in sys.modules and load_adapter("hp_mesh", framework).is_torch_mesh(mesh):
        return DeviceMesh.from_torch(mesh)
    raise MeshTypeError(
        f"a mesh was expected and a {type(mesh).__name__} was found. Pass a hp_mesh.DeviceMesh or "
        f"a torch DeviceMesh."
    )
