"""Unit plans for tests: parameters cut along one dim, by the ceil rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_comm.plan import ParamSpec, UnitPlan, plan_unit
from hp_mesh import Box, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Iterable


def chunk_boxes(shape: tuple[int, ...], dim: int, num_ranks: int) -> tuple[Box, ...]:
    """Return what each rank keeps of a tensor that is cut along one dim.

    Args:
        shape: Of the whole tensor; at least one dim.
        dim: Which dim to cut, counted from 0.
        num_ranks: Number of pieces; trailing ones may be empty.

    Example:
        >>> [box.sizes for box in chunk_boxes((2, 5), 1, 3)]
        [(2, 2), (2, 2), (2, 1)]
    """
    made = []
    for rank in range(num_ranks):
        start, stop = shard_bounds(shape[dim], num_ranks, rank)
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, stop - start
        made.append(Box(tuple(offsets), tuple(sizes)))
    return tuple(made)


def chunked_plan(
    num_ranks: int,
    params: Iterable[tuple[tuple[int, ...], int]],
    *,
    compute_dtype: str = "float32",
    reduce_dtype: str = "float32",
) -> UnitPlan:
    """Return a plan for float32 parameters named "p0", "p1", ...

    Args:
        num_ranks: Number of ranks.
        params: Per parameter its shape and the dim along which it is cut.
        compute_dtype: Data type of the full parameters.
        reduce_dtype: Data type in which gradients are added.

    Example:
        >>> chunked_plan(2, [((4, 3), 0)]).params[0].boxes[1].offsets
        (2, 0)
    """
    specs = [
        ParamSpec(
            f"p{number}",
            shape,
            chunk_boxes(shape, dim, num_ranks),
            "float32",
            compute_dtype,
            reduce_dtype,
        )
        for number, (shape, dim) in enumerate(params)
    ]
    return plan_unit(specs, world_size=num_ranks)
