"""Checks of what users pass for a mesh; all are made before anything else happens."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from hp_mesh.errors import MeshError, MeshTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

DEVICE_TYPES = ("cpu", "cuda", "npu")
MAX_RANKS_SHOWN = 8


@runtime_checkable
class _HasToList(Protocol):
    def tolist(self) -> object: ...


def check_device_type(device_type: object) -> None:
    """Raise unless the device type is a known one."""
    if device_type not in DEVICE_TYPES:
        raise MeshError(f"device type {device_type!r} isn't known. Pass one of {DEVICE_TYPES}.")


def check_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a mesh as a tuple of ints; raise unless it is a sequence of sizes."""
    if not isinstance(shape, (tuple, list)):
        raise MeshTypeError(
            f"the shape of a mesh is a tuple of ints; found {shape!r} of type "
            f"{type(shape).__name__}."
        )
    found = tuple(size for item in shape if (size := _as_int(item)) is not None)
    if len(found) != len(shape):
        raise MeshTypeError(
            f"a mesh was asked for with shape {shape!r}. Pass ints, one size per axis."
        )
    if not found or min(found) < 1:
        raise MeshError(
            f"a mesh was asked for with shape {shape!r}. Pass at least one axis, each of size 1 or "
            f"more."
        )
    return found


def check_names(names: object, num_axes: int) -> tuple[str, ...]:
    """Return axis names as a tuple; raise unless there is one distinct name per axis."""
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise MeshTypeError(f"axis names are a tuple of strings; found {names!r}.")
    found = tuple(names)
    if len(found) != num_axes or len(set(found)) != num_axes or "" in found:
        raise MeshError(
            f"a mesh of {num_axes} axes got the names {found}. Pass {num_axes} different, "
            f"non-empty names."
        )
    return found


def flat_ranks(mesh: object) -> tuple[tuple[int, ...], Sequence[int]]:
    """Return the shape and the flat ranks of nested lists, an array or a tensor.

    Raises:
        MeshTypeError: It is none of these, or holds something else than ints.
        MeshError: It is ragged, empty, or names a rank twice or a negative one.

    Example:
        >>> flat_ranks([[0, 2], [4, 6]])
        ((2, 2), (0, 2, 4, 6))
    """
    if isinstance(mesh, range):
        _check_ranks(mesh)
        return (len(mesh),), mesh
    nested = mesh.tolist() if isinstance(mesh, _HasToList) else mesh
    if not isinstance(nested, (list, tuple)):
        raise MeshTypeError(
            f"a mesh is made of nested lists of ranks, an array or a tensor with at least one "
            f"axis; found {type(mesh).__name__}."
        )
    shape = _shape(nested)
    ranks: list[int] = []
    _collect(nested, shape, ranks)
    _check_ranks(ranks)
    return shape, tuple(ranks)


def _check_ranks(ranks: Sequence[int]) -> None:
    if not ranks:
        raise MeshError("a mesh was asked for without ranks. Name at least one on every axis.")
    lowest = min(ranks[0], ranks[-1]) if isinstance(ranks, range) else min(ranks)
    repeats = not isinstance(ranks, range) and len(set(ranks)) != len(ranks)
    if repeats or lowest < 0:
        raise MeshError(
            f"a mesh names a rank twice, or a negative one: {_shortened(ranks)}. Name every rank "
            f"once, counted from 0."
        )


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) <= MAX_RANKS_SHOWN:
        return str(list(ranks))
    return f"{list(ranks[:MAX_RANKS_SHOWN])} and {len(ranks) - MAX_RANKS_SHOWN} more"


def _shape(nested: object) -> tuple[int, ...]:
    if isinstance(nested, (list, tuple)):
        return (len(nested), *(_shape(nested[0]) if nested else ()))
    return ()


def _collect(nested: object, shape: tuple[int, ...], ranks: list[int]) -> None:
    """Append the ranks in row-major order; raise where the lists haven't this shape."""
    is_list = isinstance(nested, (list, tuple))
    if is_list != bool(shape) or (is_list and len(cast("list[object]", nested)) != shape[0]):
        raise MeshError(
            f"the lists of a mesh differ in length or depth: found {nested!r} where the first one "
            f"has shape {shape}. Pass lists of equal length."
        )
    if is_list:
        for item in cast("list[object]", nested):
            _collect(item, shape[1:], ranks)
        return
    rank = _as_int(nested)
    if rank is None:
        raise MeshTypeError(f"a mesh holds {nested!r}, which isn't a rank. Pass ints.")
    ranks.append(rank)


def _as_int(value: object) -> int | None:
    """Return an int, numpy's included, as Python's; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None
