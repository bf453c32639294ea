"""Numbers for tests: the same on every rank, in and out of any framework's arrays by way of numpy.

Small whole numbers, so that sums are exact in every data type and in every order.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.ports import Array, ArrayOps

Floats = npt.NDArray[np.float64]
LARGEST = 5


@lru_cache(maxsize=4096)
def numbers(shape: tuple[int, ...], *seed: int) -> Floats:
    """Return whole numbers in [1, 5] that depend on shape and seed only, read-only.

    Args:
        shape: Of the array.
        *seed: For example what it is for, and a rank.

    Example:
        >>> bool((numbers((2, 2), 7) == numbers((2, 2), 7)).all())
        True
    """
    random = np.random.default_rng([*seed, *shape])
    made = random.integers(1, LARGEST + 1, size=shape).astype(np.float64)
    made.flags.writeable = False
    return made


def total(shape: tuple[int, ...], ranks: Sequence[int], *seed: int) -> Floats:
    """Return the sum of `numbers(shape, rank, *seed)` over ranks.

    Example:
        >>> bool((total((2,), [0, 1]) == numbers((2,), 0) + numbers((2,), 1)).all())
        True
    """
    added = np.zeros(shape)
    for rank in ranks:
        added += numbers(shape, rank, *seed)
    return added


def put(ops: ArrayOps, values: Floats, dtype: str, room: int = 0) -> Array:
    """Return a new array of a framework with these values.

    Args:
        ops: The framework's operations.
        values: float64.
        dtype: Data type of the array, by name.
        room: The array is the start of memory for this many elements, if that is more.
    """
    count = math.prod(values.shape)
    memory = ops.empty((max(room, count),), dtype)
    ops.fill_zero(memory)
    made = ops.reshape(ops.box(memory, Box((0,), (count,))), values.shape)
    ops.copy(made, _over(ops, bytearray(values.tobytes()), values.shape))
    return made


def read(ops: ArrayOps, array: Array) -> Floats:
    """Return the values of a framework's array.

    Args:
        ops: The framework's operations.
        array: Of any real data type.

    Example:
        >>> from hp_comm.testing import NumpyOps
        >>> read(NumpyOps(), put(NumpyOps(), np.ones(2), "int8"))
        array([1., 1.])
    """
    shape = tuple(array.shape)
    buffer = bytearray(8 * math.prod(shape))
    ops.copy(_over(ops, buffer, shape), array)
    return np.frombuffer(buffer, np.float64).reshape(shape)


def _over(ops: ArrayOps, buffer: bytearray, shape: tuple[int, ...]) -> Array:
    if not math.prod(shape):
        return ops.empty(shape, "float64")
    return ops.from_buffer(memoryview(buffer), shape, "float64", 0)
