"""Grids of ranks with named axes: which ranks are where, and which form a group.

A `DeviceMesh` adds the device type, the ranks and process groups to an `AbstractMesh`. Groups are
made at first use. All arithmetic is in `layout.py`.

Source: torch's DeviceMesh (names of methods); JAX's split in an abstract and a real mesh.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from typing import TYPE_CHECKING

from hp_mesh._framework import load_adapter
from hp_mesh.abstract import AbstractMesh
from hp_mesh.check import (
    MAX_RANKS_SHOWN,
    check_device_type,
    check_names,
    check_shape,
    flat_ranks,
)
from hp_mesh.errors import MeshError, MeshStateError, MeshTypeError
from hp_mesh.groups import REGISTRY, own_rank, runtime, started_runtime
from hp_mesh.layout import MeshLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hp_mesh._framework import Framework


class DeviceMesh:
    """A grid of ranks with process groups along its axes.

    Args:
        device_type: "cpu", "cuda" or "npu".
        mesh: Global ranks as nested lists, an array or a tensor; None: all ranks on one axis.
        mesh_dim_names: One name per axis; None: axes are given by number.

    Raises:
        MeshError: Sizes, names or ranks don't fit together.
        MeshTypeError: `mesh` or the names are of a wrong type.
        MeshStateError: `mesh` is None, and there are no process groups and no launcher.

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
            mesh = range(started_runtime(device_type).world_size())
        shape, ranks = flat_ranks(mesh)
        names = None if mesh_dim_names is None else check_names(mesh_dim_names, len(shape))
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
        self._abstract = AbstractMesh(layout.sizes, names or tuple(map(str, range(self.ndim))))
        self._given_torch_mesh: object = None  # made by `from_torch` of this one
        self._torch_mesh: tuple[object, object] | None = None  # the default group, and for it
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
        return self._abstract.axis_names

    @property
    def abstract(self) -> AbstractMesh:
        """Shape and names alone."""
        return self._abstract

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in row-major order; as long as the mesh is big."""
        return tuple(self._iterate_ranks())

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return own_rank()

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, of the whole mesh or along one axis."""
        return self._abstract.size(axis)

    def axis_index(self, axis: str | int) -> int:
        """Return the position of an axis given by name or number."""
        return self._abstract.axis_index(axis)

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
        matter. The members are numbered in the order of the mesh.

        Args:
            axis: Which one; may be left out where there is only one.

        Raises:
            MeshStateError: There are no process groups, this process isn't in the mesh, or the
                mesh names ranks that the job doesn't have.
        """
        index = self._single(axis)
        root, name = self.root_mesh, self.axis_names[index]
        if root._given_torch_mesh is not None and name in root.axis_names:
            return root._given_torch_mesh.get_group(root.axis_index(name))  # type: ignore[attr-defined]  # torch's mesh
        ranks = self.ranks_along(index)
        self._make_groups()
        return REGISTRY.get(runtime(), ranks)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of these axes on which this process lies.

        Args:
            names: One axis name, or several in the order of this mesh; the root also takes the
                name of axes that were flattened.

        Raises:
            MeshKeyError: A name isn't in the mesh.
            MeshError: No names, a name twice, or another order than the mesh's.
            MeshTypeError: Not a name or a tuple of names.
            MeshStateError: The mesh has no names, or this process isn't in it.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise MeshTypeError(
                f"mesh[...] takes an axis name or a tuple of them; it got {names!r}."
            )
        if len(wanted) == 1 and wanted[0] in self._flattened:  # filled on the root only
            return self._flattened[wanted[0]]
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
            MeshError: The name is an axis of the root or was given to other axes, or the ranks
                aren't evenly spaced.
            MeshTypeError: The name isn't a string.
            MeshStateError: This process isn't in the mesh.
        """
        if name is None:
            name = "_".join(self.axis_names)
        check_names((name,), 1)
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
        """Return torch's DeviceMesh over the same groups; the same object each time.

        After the process groups were destroyed and made again, it is a new one over the new ones.
        """
        if self._given_torch_mesh is not None:
            return self._given_torch_mesh
        adapter = load_adapter("hp_mesh", "torch")
        default = adapter.RUNTIME.default_group()
        if self._torch_mesh is None or self._torch_mesh[0] is not default:
            self._torch_mesh = default, adapter.make_torch_mesh(self)
        return self._torch_mesh[1]

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

    def _make_groups(self) -> None:
        """See Note [one order for all groups]."""
        root, groups = self.root_mesh, runtime()
        root._check_ranks_exist(groups.world_size())
        if root._given_torch_mesh is None:
            for axis in range(root.ndim):
                REGISTRY.get(groups, root.ranks_along(axis))
        if root is self or self.mesh_dim_names is None:
            return
        if self.mesh_dim_names[0] in root._flattened:
            for name, flat in root._flattened.items():
                REGISTRY.get(groups, flat.ranks)
                if name == self.mesh_dim_names[0]:
                    return

    def _check_ranks_exist(self, world_size: int) -> None:
        ranks = self._root_ranks
        highest = max(ranks[0], ranks[-1]) if isinstance(ranks, range) else max(ranks)
        if highest >= world_size:
            raise MeshStateError(
                f"process groups of {self!r} were asked for and the job has the ranks 0 to "
                f"{world_size - 1}, not {highest}. Start more processes or make a smaller mesh."
            )

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

    def _iterate_ranks(self) -> Iterator[int]:
        return (self._root_ranks[self._offset + place] for place in self._layout.positions())

    def _shown_ranks(self) -> str:
        shown = ", ".join(map(str, itertools.islice(self._iterate_ranks(), MAX_RANKS_SHOWN)))
        return f"[{shown}{', ...' if self.size() > MAX_RANKS_SHOWN else ''}]"

    def _same_place(self, other: DeviceMesh) -> bool:
        if self.shape != other.shape:
            return False
        mine, theirs = (self._layout, self._offset), (other._layout, other._offset)
        if mine == theirs and self._root_ranks == other._root_ranks:
            return True
        return all(map(operator.eq, self._iterate_ranks(), other._iterate_ranks()))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        mine = (self.device_type, self.mesh_dim_names)
        return mine == (other.device_type, other.mesh_dim_names) and self._same_place(other)

    def __hash__(self) -> int:
        first = self._root_ranks[self._offset]
        return hash((self.device_type, self.shape, self.mesh_dim_names, first))

    def __deepcopy__(self, memo: dict[int, object]) -> DeviceMesh:
        return self  # a value: copies of a model keep the mesh and its groups

    def __getstate__(self) -> dict[str, object]:
        made_here = {"_given_torch_mesh": None, "_torch_mesh": None}
        return {**vars(self), **made_here}  # groups don't leave their process

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
        MeshError: Sizes or names don't fit together.
        MeshTypeError: The sizes aren't ints, or the names aren't strings.
        MeshStateError: The product isn't the number of ranks, or there are neither process groups
            nor a launcher.
    """
    check_device_type(device_type)
    shape = check_shape(mesh_shape)
    names = None if mesh_dim_names is None else check_names(mesh_dim_names, len(shape))
    count = math.prod(shape)
    if "torch" in sys.modules:  # else pure use: plans of jobs that run elsewhere
        _check_world(shape, count, started_runtime(device_type).world_size())
    made = DeviceMesh.__new__(DeviceMesh)
    made._setup(device_type, MeshLayout.dense(shape), names, root_ranks=range(count))
    return made


def _check_world(shape: tuple[int, ...], count: int, world_size: int) -> None:
    if count != world_size:
        raise MeshStateError(
            f"a mesh of shape {shape} has {count} ranks and the job has {world_size}. "
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
