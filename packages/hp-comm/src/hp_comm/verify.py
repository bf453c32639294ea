"""Checks of a collective's arguments, made before anything is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

from hp_comm.errors import CommError
from hp_comm.ports import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.ports import Array, ArrayOps

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)


def check_array(ops: ArrayOps, array: Array, op: str | None = None) -> None:
    """Raise unless the array can be sent as it lies, and reduced so if it is to be reduced."""
    _check_contiguous(ops, array, "the array")
    if op is not None:
        _check_op(ops, array, op)


def check_source(source: int, num_ranks: int) -> None:
    """Raise unless a group index is inside the group."""
    if not isinstance(source, int) or not 0 <= source < num_ranks:
        raise CommError(
            f"broadcast was asked for from group index {source!r} in a group of {num_ranks} ranks. "
            f"Pass an index in [0, {num_ranks})."
        )


def check_value(value: bytes) -> None:
    """Raise unless a value is bytes."""
    if not isinstance(value, bytes):
        raise CommError(
            f"all_gather_bytes was given a {type(value).__name__}. Pass bytes, for example "
            f"bytes(value) or value.encode()."
        )


def check_all_gather(ops: ArrayOps, output: Array, source: Array, num_ranks: int) -> None:
    """Raise unless `output` has room for every rank's `source`."""
    _check_pair(ops, output, source)
    _check_sizes("all_gather_into", output, source, num_ranks)


def check_reduce_scatter(
    ops: ArrayOps, output: Array, source: Array, op: str, num_ranks: int
) -> None:
    """Raise unless `source` is one `output` per rank."""
    _check_pair(ops, output, source)
    _check_op(ops, source, op)
    _check_sizes("reduce_scatter_into", source, output, num_ranks)


def check_unit_arrays(
    label: str,
    what: str,
    arrays: Sequence[Array | None],
    wanted: Sequence[tuple[str, tuple[int, ...]]],
) -> None:
    """Raise unless a unit was given one array per parameter, of the right shape.

    Args:
        label: The unit's name.
        what: What the arrays are: "shard" or "gradient".
        arrays: What was given; None where there is none.
        wanted: Name and shape for each parameter.
    """
    if len(arrays) != len(wanted):
        raise CommError(
            f"unit {label!r} of {len(wanted)} parameters was given {len(arrays)} {what}s. Pass "
            f"one per parameter."
        )
    for given, (name, shape) in zip(arrays, wanted, strict=True):
        if given is not None and tuple(given.shape) != shape:
            raise CommError(
                f"the {what} of parameter {name!r} of unit {label!r} has shape "
                f"{tuple(given.shape)}. Pass one of shape {shape}."
            )


def _check_sizes(call: str, large: Array, small: Array, num_ranks: int) -> None:
    have, part = math.prod(large.shape), math.prod(small.shape)
    if have != num_ranks * part:
        raise CommError(
            f"{call} over {num_ranks} ranks was given {have} elements {tuple(large.shape)} on the "
            f"whole side and {part} elements {tuple(small.shape)} on one rank's. Pass "
            f"{num_ranks} x {part} = {num_ranks * part} elements."
        )


def _check_pair(ops: ArrayOps, output: Array, source: Array) -> None:
    _check_contiguous(ops, output, "output")
    _check_contiguous(ops, source, "source")
    found = ops.dtype_of(output), ops.dtype_of(source)
    if found[0] != found[1]:
        raise CommError(
            f"output has the data type {found[0]} and source {found[1]}. Cast one of them."
        )


def _check_contiguous(ops: ArrayOps, array: Array, what: str) -> None:
    if not ops.is_contiguous(array):
        raise CommError(
            f"{what} of shape {tuple(array.shape)} isn't contiguous. Pass a contiguous one."
        )


def _check_op(ops: ArrayOps, array: Array, op: str) -> None:
    if op not in REDUCE_OPS:
        raise CommError(f"reduce operation {op!r} isn't known. Pass one of {REDUCE_OPS}.")
    dtype = ops.dtype_of(array)
    if op in ("avg", "prod", "sum") and dtype == "bool":
        raise CommError(f"{op!r} of booleans has no meaning. Use max (any) or min (all).")
    if op in ("max", "min") and dtype.startswith("complex"):
        raise CommError(f"{op!r} of {dtype} has no meaning: complex numbers have no order.")
