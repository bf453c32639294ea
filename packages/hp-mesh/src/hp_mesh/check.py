"""Checks of what users pass for a mesh; all are made before anything else happens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from hp_mesh.errors import MeshError, MeshTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE_TYPES = ("cpu", "cuda", "npu")


@runtime_checkable
class _HasToList(Protocol):
    def tolist(self) -> object: ...


def check_device_type(device_type: object) -> None:
    """Raise unless the device type is a known one."""
    if device_type not in DEVICE_TYPES:
        raise MeshError(f"device type {device_type!r} isn't known. Pass one of {DEVICE_TYPES}.")


def check_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a mesh as it is; raise unless it is a tuple of positive ints."""
    if not isinstance(shape, tuple):
        raise MeshTypeError(
            f"the shape of a mesh is a tuple of ints; found {shape!r} of type "
            f"{type(shape).__name__}."
        )
    good = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape)
    if not shape or not good:
        raise MeshError(
            f"a mesh was asked for with shape {shape!r}. Pass at least one axis, each of size 1 or "
            f"more."
        )
    return cast("tuple[int, ...]", shape)


def check_names(names: Sequence[str] | None, num_axes: int) -> tuple[str, ...] | None:
    """Return axis names as a tuple; raise unless there is one distinct name per axis."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
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
        return check_shape((len(mesh),)), mesh
    nested = mesh.tolist() if isinstance(mesh, _HasToList) else mesh
    if not isinstance(nested, (list, tuple)):
        raise MeshTypeError(
            f"a mesh is made of nested lists of ranks, an array or a tensor with at least one "
            f"axis; found {type(mesh).__name__}."
        )
    shape = check_shape(_shape(nested))
    ranks = tuple(_flatten(nested))
    if len(ranks) != math.prod(shape):
        raise MeshError(f"the lists of a mesh differ in length: {nested!r}.")
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise MeshError(f"a mesh names a rank twice, or a negative one: {ranks}.")
    return shape, ranks


def _shape(nested: object) -> tuple[int, ...]:
    if isinstance(nested, (list, tuple)):
        return (len(nested), *(_shape(nested[0]) if nested else ()))
    return ()


def _flatten(nested: object) -> list[int]:
    if isinstance(nested, (list, tuple)):
        return [rank for item in nested for rank in _flatten(item)]
    if isinstance(nested, int) and not isinstance(nested, bool):
        return [nested]
    raise MeshTypeError(f"a mesh holds {nested!r}, which isn't a rank. Pass ints.")
