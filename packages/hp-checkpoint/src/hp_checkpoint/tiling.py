"""Do boxes cover a tensor exactly once?

Volumes add up to the tensor's and no two boxes overlap. Overlaps are looked for along the dim with
most distinct starts, so boxes of a usual sharding are compared with few others.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_mesh import Box


def fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return why boxes don't tile a shape, or None if they do.

    Args:
        shape: Lengths of the dims, in elements.
        boxes: Parts of it; empty boxes are not allowed.

    Example:
        >>> from hp_mesh import Box
        >>> fault((4, 2), [Box((0, 0), (3, 2)), Box((3, 0), (1, 2))])
        >>> fault((4,), [Box((0,), (2,))])
        'they hold 2 of 4 elements'
    """
    for box in boxes:
        if box.ndim != len(shape):
            return f"{box} has {box.ndim} dims, the tensor {len(shape)}"
        inside = all(stop <= length for stop, length in zip(box.stops, shape, strict=True))
        if not inside or min(box.offsets, default=0) < 0 or box.num_elements <= 0:
            return f"{box} is empty or lies outside of shape {shape}"
    total = prod(shape)
    held = sum(box.num_elements for box in boxes)
    overlap = find_overlap(boxes)
    if overlap is not None:
        return f"{overlap[0]} and {overlap[1]} overlap"
    return None if held == total else f"they hold {held} of {total} elements"


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None.

    Example:
        >>> from hp_mesh import Box
        >>> find_overlap([Box((0,), (2,)), Box((2,), (2,))])
    """
    if len(boxes) < 2:  # noqa: PLR2004
        return None
    if not boxes[0].ndim:
        return boxes[0], boxes[1]
    dim = max(range(boxes[0].ndim), key=lambda d: len({box.offsets[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda one: one.offsets[dim]):
        active = [other for other in active if other.stops[dim] > box.offsets[dim]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None
