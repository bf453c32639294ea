"""The tensor operations of hp_comm over numpy arrays; for tests without a framework."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from hp_comm.errors import CommError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.ports import Array, ReduceOp
    from hp_mesh import Box

NumpyArray = npt.NDArray[np.generic]
COMBINE = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def _np(array: Array) -> NumpyArray:
    return cast("NumpyArray", array)


class NumpyOps:
    """Implements `hp_comm.ports.ArrayOps`.

    Example:
        >>> ops = NumpyOps()
        >>> ops.dtype_of(ops.empty((2,), "float32"))
        'float32'
    """

    def dtype_of(self, array: Array) -> str:
        """Return the name of the array's data type."""
        return str(_np(array).dtype)

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Return new memory."""
        try:
            return np.empty(tuple(shape), np.dtype(dtype))
        except TypeError as error:
            raise CommError(f"numpy has no data type {dtype!r}. Use another one.") from error

    def from_buffer(
        self, buffer: memoryview, shape: Sequence[int], dtype: str, offset_bytes: int
    ) -> Array:
        """Return an array over the buffer's memory."""
        count = math.prod(shape)
        flat = np.frombuffer(buffer, np.dtype(dtype), count=count, offset=offset_bytes)
        return flat.reshape(tuple(shape))

    def copy(self, target: Array, source: Array) -> None:
        """Write one array into another, casting on the way."""
        np.copyto(_np(target), _np(source), casting="unsafe")

    def add(self, target: Array, left: Array, right: Array) -> None:
        """Write the sum of two arrays into a third."""
        np.add(_np(left), _np(right), out=_np(target))

    def combine(self, target: Array, other: Array, op: ReduceOp) -> None:
        """Fold one array into another in place."""
        COMBINE[op](_np(target), _np(other), out=_np(target))

    def scale(self, target: Array, factor: float) -> None:
        """Multiply in place; integers are divided by the rounded reciprocal, towards zero."""
        if np.issubdtype(_np(target).dtype, np.integer):
            whole = cast("npt.NDArray[np.int64]", target)
            divisor = whole.dtype.type(round(1 / factor))
            np.subtract(whole, np.fmod(whole, divisor), out=whole)  # has the dividend's sign
            np.floor_divide(whole, divisor, out=whole)
        else:
            np.multiply(_np(target), factor, out=_np(target))

    def fill_zero(self, target: Array) -> None:
        """Set every element to zero."""
        _np(target).fill(0)

    def box(self, array: Array, box: Box) -> Array:
        """Return the view that a box describes."""
        return _np(array)[box.slices() or ...]  # an index of no dims would give a copy

    def reshape(self, array: Array, shape: Sequence[int]) -> Array:
        """Return a view with another shape."""
        made = _np(array).reshape(tuple(shape))
        assert not made.size or np.shares_memory(made, _np(array)), "a view was asked for"
        return made

    def is_contiguous(self, array: Array) -> bool:
        """Tell whether the elements lie in row-major order without gaps."""
        return bool(_np(array).flags.c_contiguous)

    def extend(self, array: Array, num_elements: int) -> Array | None:
        """Return the same memory as a 1-D array of this length, or None."""
        own = _np(array)
        whole = own
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if not own.flags.c_contiguous or not whole.flags.c_contiguous or whole.dtype != own.dtype:
            return None
        start = (_address(own) - _address(whole)) // own.itemsize
        flat = whole.reshape(-1)[start : start + num_elements]
        return flat if flat.size == num_elements else None


def _address(array: NumpyArray) -> int:
    return int(array.__array_interface__["data"][0])
