"""How many bytes an array has, and how many a collective moves at least."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hp_comm.plan import itemsize

if TYPE_CHECKING:
    from hp_comm.ports import Array, ArrayOps


def nbytes(ops: ArrayOps, array: Array) -> int:
    """Return the bytes of an array's elements.

    Example:
        >>> from hp_comm.testing import NumpyOps
        >>> nbytes(NumpyOps(), NumpyOps().empty((2, 3), "float64"))
        48
    """
    return math.prod(array.shape) * itemsize(ops.dtype_of(array))


def all_reduce_bytes(size_bytes: int, num_ranks: int) -> int:
    """Return what each rank of a ring all-reduce receives, rounded up.

    Example:
        >>> all_reduce_bytes(8, 2)
        8
    """
    return -(-2 * (num_ranks - 1) * size_bytes // num_ranks)
