"""Which box of a tensor each position of a mesh holds.

Pure. A layout is a mesh and one placement per axis. Axes that cut the same dim cut it one after
the other, from the first axis to the last: each cuts what the one before left.

Invariant: the boxes of all positions cover the tensor; those of positions that differ only along
replicated axes are equal, all others are disjoint.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_dtensor.errors import LayoutError
from hp_dtensor.placement import Placement, Replicate, Shard
from hp_mesh import AbstractMesh, Box, DeviceMesh, MeshStateError, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Layout:
    """How a tensor is spread over a mesh.

    Args:
        mesh: The mesh; an abstract one is enough for everything but `local_box`.
        placements: One per mesh axis.

    Raises:
        LayoutError: There isn't exactly one known placement per axis, or the mesh isn't one of
            hp_mesh.

    Example:
        >>> layout = Layout(AbstractMesh((2,), ("dp",)), (Shard(0),))
        >>> [box.sizes for box in layout.boxes((3, 4))]
        [(2, 4), (1, 4)]
    """

    mesh: AbstractMesh | DeviceMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, (AbstractMesh, DeviceMesh)):
            raise LayoutError(
                f"a layout needs a mesh of hp_mesh; found a {type(self.mesh).__name__}. Pass "
                f"hp_mesh.as_device_mesh(mesh)."
            )
        if not isinstance(self.placements, (tuple, list)):
            raise LayoutError(
                f"a layout got the placements {self.placements!r}. Pass a tuple, one per mesh axis."
            )
        object.__setattr__(self, "placements", tuple(self.placements))
        if len(self.placements) != self.mesh.ndim:
            raise LayoutError(
                f"{len(self.placements)} placements {self.placements} were given for a mesh of "
                f"{self.mesh.ndim} axes {self.mesh.axis_names}. Pass one per axis."
            )
        for placement in self.placements:
            if not isinstance(placement, (Shard, Replicate)):
                raise LayoutError(
                    f"{placement!r} isn't a placement. Pass hp_dtensor.Shard(dim) or Replicate()."
                )

    def normalized(self, shape: Sequence[int]) -> tuple[Placement, ...]:
        """Return the placements with dims counted from the first one.

        Args:
            shape: Of the whole tensor.

        Raises:
            LayoutError: A dim is outside the tensor.
        """
        return tuple(_normalize(placement, shape) for placement in self.placements)

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """Return what the rank at a mesh position holds.

        Args:
            shape: Of the whole tensor.
            coordinate: Position on each mesh axis.

        Raises:
            LayoutError: A dim is outside the tensor, or the coordinate outside the mesh.
        """
        if len(coordinate) != self.mesh.ndim or not all(
            0 <= index < size for index, size in zip(coordinate, self.mesh.shape, strict=True)
        ):
            raise LayoutError(
                f"coordinate {tuple(coordinate)} was given for a mesh of shape {self.mesh.shape}. "
                f"Pass one number per axis, from 0 to below its size."
            )
        offsets, sizes = [0] * len(shape), list(shape)
        steps = zip(self.normalized(shape), self.mesh.shape, coordinate, strict=True)
        for placement, num_ranks, index in steps:
            if isinstance(placement, Shard):
                dim = placement.dim
                start, stop = shard_bounds(sizes[dim], num_ranks, index)
                offsets[dim] += start
                sizes[dim] = stop - start
        return Box(tuple(offsets), tuple(sizes))

    def boxes(self, shape: Sequence[int]) -> tuple[Box, ...]:
        """Return what every rank holds, by mesh position in row-major order."""
        positions = itertools.product(*map(range, self.mesh.shape))
        return tuple(self.box(shape, position) for position in positions)

    def local_box(self, shape: Sequence[int]) -> Box:
        """Return what this process holds.

        Raises:
            MeshStateError: The mesh is abstract, or this process isn't in it.
        """
        coordinate = self.mesh.get_coordinate() if isinstance(self.mesh, DeviceMesh) else None
        if coordinate is None:
            raise MeshStateError(
                f"this process has no position in {self.mesh!r}. Ask for box(shape, coordinate)."
            )
        return self.box(shape, coordinate)


def _normalize(placement: Placement, shape: Sequence[int]) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    ndim = len(shape)
    if not -ndim <= placement.dim < ndim:
        raise LayoutError(
            f"{placement!r} was asked for on a tensor of shape {tuple(shape)}. Pass a dim in "
            f"[0, {ndim})" + (" (a scalar has none: replicate it)." if not ndim else ".")
        )
    return Shard(placement.dim % ndim)
