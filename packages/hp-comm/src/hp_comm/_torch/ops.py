"""The tensor operations of hp_comm on torch tensors, outside autograd.

Note [memory outlives its caller's mode]: a unit that is opened in inference mode is trained later.
A tensor that was made in that mode could never be written or saved for a backward outside it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, cast

import torch

from hp_comm.errors import CommError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.ports import Array, ReduceOp
    from hp_mesh import Box


def _torch(array: Array) -> torch.Tensor:
    return cast("torch.Tensor", array)


def _array(tensor: torch.Tensor) -> Array:
    return cast("Array", tensor)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's data type of this name.

    Raises:
        CommError: torch has none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CommError(f"torch has no data type {name!r}. Pass one such as 'float32'.")
    return found


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TorchOps:
    """Implements `hp_comm.ports.ArrayOps`.

    Args:
        device: Where new tensors are made.

    Example:
        >>> ops = TorchOps("cpu")
        >>> ops.dtype_of(ops.empty((2,), "bfloat16"))
        'bfloat16'
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def dtype_of(self, array: Array) -> str:
        """Return the name of the tensor's data type."""
        return _name_of(_torch(array).dtype)

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Return new memory."""
        kind = torch_dtype(dtype)
        with torch.inference_mode(False):  # see Note [memory outlives its caller's mode]
            return _array(torch.empty(tuple(shape), dtype=kind, device=self._device))

    def from_buffer(
        self, buffer: memoryview, shape: Sequence[int], dtype: str, offset_bytes: int
    ) -> Array:
        """Return a tensor over the buffer's memory."""
        count = math.prod(shape)
        kind = torch_dtype(dtype)
        with torch.inference_mode(False):
            if not count:
                return _array(torch.empty(tuple(shape), dtype=kind, device="cpu"))
            flat = torch.frombuffer(buffer, dtype=kind, count=count, offset=offset_bytes)
            return _array(flat.view(tuple(shape)))

    def copy(self, target: Array, source: Array) -> None:
        """Write one tensor into another, casting on the way."""
        with torch.no_grad():
            _torch(target).copy_(_torch(source))

    def add(self, target: Array, left: Array, right: Array) -> None:
        """Write the sum of two tensors into a third."""
        with torch.no_grad():
            torch.add(_torch(left), _torch(right), out=_torch(target))

    def combine(self, target: Array, other: Array, op: ReduceOp) -> None:
        """Fold one tensor into another in place."""
        mine, theirs = _torch(target), _torch(other)
        with torch.no_grad():
            if op in ("sum", "avg"):
                mine.add_(theirs)
            elif op == "prod":
                mine.mul_(theirs)
            elif op == "max":
                torch.maximum(mine, theirs, out=mine)
            else:
                torch.minimum(mine, theirs, out=mine)

    def scale(self, target: Array, factor: float) -> None:
        """Multiply in place; integers are divided by the rounded reciprocal, towards zero."""
        tensor = _torch(target)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.mul_(factor)
            else:
                tensor.div_(round(1 / factor), rounding_mode="trunc")

    def fill_zero(self, target: Array) -> None:
        """Set every element to zero."""
        with torch.no_grad():
            _torch(target).zero_()

    def box(self, array: Array, box: Box) -> Array:
        """Return the view that a box describes."""
        return _array(_torch(array).detach()[box.slices()])

    def reshape(self, array: Array, shape: Sequence[int]) -> Array:
        """Return a view with another shape."""
        return _array(_torch(array).detach().view(tuple(shape)))

    def is_contiguous(self, array: Array) -> bool:
        """Tell whether the elements lie in row-major order without gaps."""
        return _torch(array).is_contiguous()

    def extend(self, array: Array, num_elements: int) -> Array | None:
        """Return the same memory as a 1-D tensor of this length, or None."""
        tensor = _torch(array).detach()
        end = (tensor.storage_offset() + num_elements) * tensor.element_size()
        if not tensor.is_contiguous() or end > tensor.untyped_storage().nbytes():
            return None
        return _array(tensor.as_strided((num_elements,), (1,)))

    def release(self, array: Array) -> None:
        """Give the memory back; the tensor keeps its identity and shape."""
        _torch(array).untyped_storage().resize_(0)

    def restore(self, array: Array) -> None:
        """Get the memory again, uninitialised."""
        tensor = _torch(array)
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
