"""Distributed arrays over numpy: what saving and loading can be tested with, without a framework.

A `BoxArray` is a rank's part of a full array and knows which part; `NumpyArrays` opens it as the
real adapters open their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.errors import StateError
from hp_checkpoint.ports import Json, TensorInfo
from hp_checkpoint.ranges import index_of
from hp_mesh import Box, shard_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class BoxArray:
    """A rank's part of an array."""

    values: np.ndarray
    """The part."""
    shape: tuple[int, ...]
    """Lengths of the full array's dims, in elements."""
    box: Box
    """Which part it is."""
    is_plain: bool = False
    """Whether it is whole on this rank and other ranks may differ."""
    is_on_host: bool = True
    """False: pretend that the memory can't be seen, as on a device."""


def plain(values: np.ndarray) -> BoxArray:
    """Return an ordinary array.

    Example:
        >>> plain(np.zeros((2, 3))).box
        Box(offsets=(0, 0), sizes=(2, 3))
    """
    return BoxArray(values, values.shape, _whole(values.shape), is_plain=True)


def shard(full: np.ndarray, num_shards: int, index: int, *, dim: int = 0) -> BoxArray:
    """Return a rank's part of an array that is cut along one dim by the ceil rule.

    Args:
        full: The whole array.
        num_shards: How many ranks share it.
        index: Which of them.
        dim: The dim that is cut.

    Example:
        >>> shard(np.arange(5), 2, 1).values
        array([3, 4])
    """
    start, stop = shard_bounds(full.shape[dim], num_shards, index)
    offsets = [0] * full.ndim
    sizes = list(full.shape)
    offsets[dim], sizes[dim] = start, stop - start
    box = Box(tuple(offsets), tuple(sizes))
    return BoxArray(full[box.slices()].copy(), full.shape, box)


def replica(full: np.ndarray) -> BoxArray:
    """Return a rank's copy of an array that is the same on all ranks.

    Example:
        >>> replica(np.arange(5)).is_plain
        False
    """
    return BoxArray(full.copy(), full.shape, _whole(full.shape))


class NumpyArrays:
    """`Arrays` over `BoxArray`.

    Example:
        >>> NumpyArrays().describe(plain(np.zeros(3, "f4"))).dtype
        'float32'
    """

    def __init__(self) -> None:
        self.num_touched = 0

    def is_tensor(self, value: object) -> bool:
        """Tell whether a value is a `BoxArray`."""
        return isinstance(value, BoxArray)

    def describe(self, tensor: object) -> TensorInfo:
        """Return data type, shape and box.

        Raises:
            StateError: numpy's data type isn't one that is stored.
        """
        assert isinstance(tensor, BoxArray)
        name = tensor.values.dtype.name
        if name not in DTYPES:
            raise StateError(f"data type {name} can't be saved or loaded into.")
        return TensorInfo(name, tensor.shape, tensor.box, tensor.is_plain)

    def view(self, tensor: object) -> np.ndarray | None:
        """Return the part as writable carriers; None if it pretends to be on a device."""
        assert isinstance(tensor, BoxArray)
        return _carriers(tensor.values) if tensor.is_on_host else None

    def read(self, tensor: object, region: Box) -> np.ndarray:
        """Return a copy of a region of the part, as carriers."""
        assert isinstance(tensor, BoxArray)
        part: np.ndarray = _carriers(tensor.values)[index_of(region)].copy()
        return part

    def write(self, tensor: object, region: Box, values: np.ndarray) -> None:
        """Overwrite a region of the part."""
        assert isinstance(tensor, BoxArray)
        _carriers(tensor.values)[index_of(region)] = values

    def touch(self, tensor: object) -> None:
        """Count."""
        self.num_touched += 1

    def new(self, dtype: str, shape: tuple[int, ...], like: object | None) -> object:
        """Return zeros: laid out like `like` if of its shape, else whole."""
        if isinstance(like, BoxArray) and like.shape == shape:
            values = np.zeros(like.box.sizes, dtype)
            return BoxArray(values, shape, like.box, is_plain=like.is_plain)
        return plain(np.zeros(shape, dtype))

    def encode(self, value: object) -> tuple[str, Json] | None:
        """Return None: numpy's plain values need no adapter."""
        return None

    def decode(self, tag: str, content: Json) -> object:
        """Raise KeyError: no tag is known."""
        raise KeyError(tag)


def _whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _carriers(values: np.ndarray) -> np.ndarray:
    carriers: np.ndarray = values.view(DTYPES[values.dtype.name].carrier)
    return carriers
