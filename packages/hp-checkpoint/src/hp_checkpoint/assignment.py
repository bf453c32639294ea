"""Who writes what: every rank's leaves in, one list of parts per rank out.

Pure, and a function of its input alone, so every rank works it out for itself. Rules:

    the same value on all ranks that have it    kept once
    values that differ                          kept once per rank
    ordinary tensors of the same digest         stored once, by one of those that have them
    ordinary tensors that differ                stored once per rank
    boxes of distributed tensors                each stored once, by one of those that hold it

Boxes that several ranks hold are cut into rows if large, and the largest goes first, each time to
the holder with least to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hp_checkpoint.errors import StateError
from hp_checkpoint.shardfile import Part
from hp_checkpoint.tiling import fault
from hp_checkpoint.tree import name_of
from hp_checkpoint.value import json_text
from hp_mesh import Box, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hp_checkpoint.ports import Json
    from hp_checkpoint.tree import Path

SPLIT_BYTES = 1 << 22
"""Boxes that several ranks hold are cut if they are larger than this."""


@dataclass(frozen=True, slots=True)
class ValueOffer:
    """A plain value that a rank has."""

    path: Path
    """Its place in the state dict."""
    content: Json
    """The value as `value.encode` wrote it."""


@dataclass(frozen=True, slots=True)
class TensorOffer:
    """A tensor of which a rank has a part."""

    path: Path
    """Its place in the state dict."""
    dtype: str
    """Name of the data type."""
    shape: tuple[int, ...]
    """Lengths of the full tensor's dims, in elements."""
    box: Box
    """The part; may be empty."""
    digest: str | None
    """Digest of an ordinary tensor; None for a distributed one."""


Offer: TypeAlias = ValueOffer | TensorOffer


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint to be."""

    path: Path
    """Its place in the state dict."""
    dtype: str
    """Name of the data type."""
    shape: tuple[int, ...]
    """Lengths of the dims, in elements."""
    rank: int | None
    """Set where the ranks' values differ: whose it is."""


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A plain value of the checkpoint to be."""

    path: Path
    """Its place in the state dict."""
    content: Json
    """The value as `value.encode` wrote it."""
    rank: int | None
    """Set where the ranks' values differ: whose it is."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is saved, and by whom."""

    leaves: tuple[SavedTensor | SavedValue, ...]
    """Tensors and values, in order of first appearance."""
    parts: tuple[tuple[Part, ...], ...]
    """What each rank writes."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A box and the ranks that could write it."""

    part: Part
    holders: tuple[int, ...]


def assign(offers: Sequence[Sequence[Offer]]) -> Assignment:
    """Decide who writes what.

    Args:
        offers: Every rank's leaves.

    Raises:
        StateError: Ranks disagree on what a key is, or the boxes of a tensor don't tile it.

    Example:
        >>> from hp_mesh import Box
        >>> path = (("dict", "w"),)
        >>> halves = [Box((0,), (2,)), Box((2,), (2,))]
        >>> offers = [[TensorOffer(path, "float32", (4,), half, None)] for half in halves]
        >>> [[part.label for part in parts] for parts in assign(offers).parts]
        [['w[0:2]'], ['w[2:4]']]
    """
    by_name: dict[str, dict[int, Offer]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            by_name.setdefault(name_of(offer.path), {})[rank] = offer
    leaves: list[SavedTensor | SavedValue] = []
    shared: list[_Shared] = []
    for name, found in by_name.items():
        tensors = {rank: one for rank, one in found.items() if isinstance(one, TensorOffer)}
        values = {rank: one for rank, one in found.items() if isinstance(one, ValueOffer)}
        if tensors and values:
            raise StateError(
                f"{name}: is a tensor on rank {min(tensors)} and a plain value on rank "
                f"{min(values)}. Give it one kind on all ranks."
            )
        if values:
            leaves += _values(values)
            continue
        own_leaves, own_shared = _tensors(name, tensors)
        leaves += own_leaves
        shared += own_shared
    return Assignment(tuple(leaves), _spread(shared, len(offers)))


def _values(values: Mapping[int, ValueOffer]) -> list[SavedValue]:
    first = next(iter(values.values()))
    if len({json_text(one.content) for one in values.values()}) == 1:
        return [SavedValue(first.path, first.content, None)]
    return [SavedValue(one.path, one.content, rank) for rank, one in values.items()]


def _tensors(
    name: str, found: Mapping[int, TensorOffer]
) -> tuple[list[SavedTensor], list[_Shared]]:
    first_rank, first = next(iter(found.items()))
    if len({one.digest is None for one in found.values()}) != 1:
        raise StateError(
            f"{name}: is a distributed tensor on some ranks and an ordinary one on others. Give "
            f"it one kind on all ranks."
        )
    same = all(
        (one.dtype, one.shape, one.digest) == (first.dtype, first.shape, first.digest)
        for one in found.values()
    )
    if not same and first.digest is None:
        rank, other = next(
            (rank, one)
            for rank, one in found.items()
            if (one.dtype, one.shape) != (first.dtype, first.shape)
        )
        raise StateError(
            f"{name}: is {first.dtype} of shape {first.shape} on rank {first_rank} and "
            f"{other.dtype} of shape {other.shape} on rank {rank}. A distributed tensor has one "
            f"data type and shape."
        )
    if not same:
        leaves = [SavedTensor(one.path, one.dtype, one.shape, r) for r, one in found.items()]
        return leaves, [
            _Shared(Part(name, rank, one.dtype, one.shape, one.box), (rank,))
            for rank, one in found.items()
            if one.box.num_elements
        ]
    leaf = SavedTensor(first.path, first.dtype, first.shape, None)
    return [leaf], _boxes(name, found)


def _boxes(name: str, found: Mapping[int, TensorOffer]) -> list[_Shared]:
    first = next(iter(found.values()))
    holders: dict[Box, list[int]] = {}
    for rank, one in found.items():
        if one.box.num_elements:
            holders.setdefault(one.box, []).append(rank)
    wrong = fault(first.shape, list(holders))
    if wrong is not None:
        raise StateError(
            f"{name}: the parts that the ranks {sorted(found)} hold don't make up its shape "
            f"{first.shape}: {wrong}. All ranks that hold a part must take part in the save."
        )
    shared: list[_Shared] = []
    for box, ranks in holders.items():
        whole = Part(name, None, first.dtype, first.shape, box)
        rows = _rows(box, len(ranks)) if whole.num_bytes > SPLIT_BYTES else [box]
        shared += [
            _Shared(Part(name, None, first.dtype, first.shape, part), tuple(ranks)) for part in rows
        ]
    return shared


def _rows(box: Box, num_parts: int) -> list[Box]:
    """Cut a box along its first dim that is longer than 1."""
    dim = next((d for d, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or num_parts == 1:
        return [box]
    parts = []
    for index in range(num_parts):
        start, stop = shard_bounds(box.sizes[dim], num_parts, index)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += start
        sizes[dim] = stop - start
        if stop > start:
            parts.append(Box(tuple(offsets), tuple(sizes)))
    return parts


def _spread(shared: Sequence[_Shared], world_size: int) -> tuple[tuple[Part, ...], ...]:
    loads = [0] * world_size
    parts: list[list[Part]] = [[] for _ in range(world_size)]
    for one in sorted(shared, key=lambda s: (len(s.holders) > 1, -s.part.num_bytes, s.part.label)):
        owner = min(one.holders, key=lambda rank: (loads[rank], rank))
        loads[owner] += one.part.num_bytes
        parts[owner].append(one.part)
    return tuple(tuple(own) for own in parts)


def offer_to_json(offer: Offer, path: Json) -> Json:
    """Return an offer as JSON.

    Args:
        offer: The offer.
        path: Its path, as JSON already.

    Example:
        >>> offer_to_json(ValueOffer((("dict", "a"),), 3), ["a"])
        {'path': ['a'], 'value': 3}
    """
    if isinstance(offer, ValueOffer):
        return {"path": path, "value": offer.content}
    return {
        "path": path,
        "dtype": offer.dtype,
        "shape": list(offer.shape),
        "offsets": list(offer.box.offsets),
        "sizes": list(offer.box.sizes),
        "digest": offer.digest,
    }
