"""How the parameters of one unit travel: big ones alone and uncopied, small ones in one bucket.

Pure: shapes, boxes and data types by name in, a frozen plan out. A parameter is *direct* when its
shards are equal chunks of dim 0 (the ceil rule), padded at the end only: then the concatenation
of all padded shards *is* the full tensor followed by padding, so it gathers straight into its
full storage. Everything else, and everything smaller than the threshold, is *bucketed*: packed
into one transfer per (storage, compute and reduce dtype).

A transport that can write every box where it belongs (shared memory) needs no bucket at all and
uses only the boxes.

Source: unit grouping as in PyTorch FSDP2's parameter groups; alone-or-packed as in DDP's buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_comm.errors import CommError
from hp_mesh import Box, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

ITEMSIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
BUCKET_BELOW_BYTES = 64 * 1024
"""A parameter smaller than this shares a bucket: below it a collective costs more than a copy."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a data type given by name.

    Raises:
        CommError: The name is unknown.

    Example:
        >>> itemsize("bfloat16")
        2
    """
    if dtype not in ITEMSIZES:
        raise CommError(f"data type {dtype!r} isn't known. Pass one of {tuple(ITEMSIZES)}.")
    return ITEMSIZES[dtype]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a unit, as far as moving it goes.

    Raises:
        CommError: The boxes don't cover the tensor exactly once, or a data type is unknown.

    Example:
        >>> boxes = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))
        >>> ParamSpec("w", (4, 3), boxes, "float32", "bfloat16", "float32").full_bytes
        24
    """

    name: str
    """For errors."""

    shape: tuple[int, ...]
    """Of the whole parameter."""

    boxes: tuple[Box, ...]
    """What each group index keeps; together they cover the tensor exactly once."""

    storage_dtype: str
    """Data type of the shards."""

    compute_dtype: str
    """Data type of the full parameter."""

    reduce_dtype: str
    """Data type in which gradients are added over the ranks."""

    trainable: bool = True
    """Whether it gets gradients."""

    def __post_init__(self) -> None:
        for dtype in (self.storage_dtype, self.compute_dtype, self.reduce_dtype):
            itemsize(dtype)
        held = sum(box.num_elements for box in self.boxes)
        inside = all(
            box.ndim == len(self.shape)
            and all(stop <= size for stop, size in zip(box.stops, self.shape, strict=True))
            for box in self.boxes
        )
        if held != self.num_elements or not inside or _overlap(self.boxes):
            raise CommError(
                f"the boxes {self.boxes} of parameter {self.name!r} hold {held} elements of a "
                f"tensor of shape {self.shape}, or overlap. Pass boxes that cover it exactly once."
            )

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole parameter in the compute dtype."""
        return self.num_elements * itemsize(self.compute_dtype)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the whole gradient in the reduce dtype."""
        return self.num_elements * itemsize(self.reduce_dtype)

    @property
    def transfer_key(self) -> tuple[str, str, str]:
        """Parameters that agree in this may share a bucket."""
        return self.storage_dtype, self.compute_dtype, self.reduce_dtype


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """How the parameters of one unit travel; made by `plan_unit`.

    Example:
        >>> boxes = (Box((0,), (2,)), Box((2,), (2,)))
        >>> spec = ParamSpec("bias", (4,), boxes, "float32", "float32", "float32")
        >>> plan_unit([spec], world_size=2).buckets
        ((0,),)
    """

    params: tuple[ParamSpec, ...]
    """All parameters; everything else names them by their index here."""

    world_size: int
    """Number of ranks in the group."""

    direct: tuple[int, ...]
    """Parameters that travel alone, straight into their full storage."""

    buckets: tuple[tuple[int, ...], ...]
    """Parameters that are packed, one bucket per combination of data types."""

    @property
    def full_bytes(self) -> int:
        """Bytes of all full parameters."""
        return sum(spec.full_bytes for spec in self.params)


def padded_shard_elements(spec: ParamSpec) -> int:
    """Return the elements of a shard with its padding: those of the largest one.

    Example:
        >>> boxes = (Box((0, 0), (2, 3)), Box((2, 0), (1, 3)))
        >>> padded_shard_elements(ParamSpec("w", (3, 3), boxes, "float32", "float32", "float32"))
        6
    """
    return max(box.num_elements for box in spec.boxes)


def is_chunked(spec: ParamSpec) -> bool:
    """Tell whether the shards are the ceil chunks of dim 0, in group order.

    Example:
        >>> boxes = (Box((0,), (1,)), Box((1,), (2,)))
        >>> is_chunked(ParamSpec("w", (3,), boxes, "float32", "float32", "float32"))
        False
    """
    if not spec.shape:
        return len(spec.boxes) == 1
    for index, box in enumerate(spec.boxes):
        start, stop = shard_bounds(spec.shape[0], len(spec.boxes), index)
        if box.sizes != (stop - start, *spec.shape[1:]):
            return False
        if box.num_elements and box.offsets != (start, *[0] * (len(spec.shape) - 1)):
            return False
    return True


def _overlap(boxes: Sequence[Box]) -> bool:
    """Tell whether two boxes share an element.

    Sweeps along the dim with the most different starts, so that a grid of n boxes costs few more
    than n comparisons.
    """
    filled = [box for box in boxes if box.num_elements]
    if len(filled) < 2 or not filled[0].ndim:  # noqa: PLR2004
        return len(filled) > 1
    dim = max(range(filled[0].ndim), key=lambda d: len({box.offsets[d] for box in filled}))
    current: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offsets[dim]):
        current = [other for other in current if other.stops[dim] > box.offsets[dim]]
        if any(box.intersect(other) is not None for other in current):
            return True
        current.append(box)
    return False


def plan_unit(
    params: Sequence[ParamSpec],
    *,
    world_size: int,
    bucket_below_bytes: int = BUCKET_BELOW_BYTES,
) -> UnitPlan:
    """Decide which parameters travel alone and which share a bucket.

    Args:
        params: The unit's parameters.
        world_size: Number of ranks in the group.
        bucket_below_bytes: Full parameters smaller than this are packed.

    Raises:
        CommError: A parameter has not one box per rank; the message names it.

    Example:
        >>> spec = ParamSpec("w", (4,), (Box((0,), (4,)),), "float32", "float32", "float32")
        >>> plan_unit([spec], world_size=1, bucket_below_bytes=0).direct
        (0,)
    """
    for spec in params:
        if len(spec.boxes) != world_size:
            raise CommError(
                f"parameter {spec.name!r} has {len(spec.boxes)} boxes for a group of {world_size} "
                f"ranks. Pass one box per rank, empty ones included."
            )
    direct: list[int] = []
    packed: dict[tuple[str, str, str], list[int]] = {}
    for index, spec in enumerate(params):
        if spec.full_bytes >= bucket_below_bytes and is_chunked(spec):
            direct.append(index)
        else:
            packed.setdefault(spec.transfer_key, []).append(index)
    buckets = tuple(tuple(indices) for indices in packed.values())
    return UnitPlan(tuple(params), world_size, tuple(direct), buckets)
