"""torch tensors and DTensors, opened: description, memory, copies, and torch's plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import hp_dtensor
from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.errors import StateError
from hp_checkpoint.ports import TensorInfo
from hp_checkpoint.ranges import index_of
from hp_mesh import Box

if TYPE_CHECKING:
    import numpy as np

    from hp_checkpoint.ports import Json

# An integer type of the same size views any other without a copy; 16 bytes have no integer.
_CARRIERS = {
    1: torch.uint8,
    2: torch.uint16,
    4: torch.uint32,
    8: torch.uint64,
    16: torch.complex128,
}
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


class TorchArrays:
    """`Arrays` over torch's tensors.

    Example:
        >>> TorchArrays().describe(torch.zeros(2, 3, dtype=torch.bfloat16)).dtype
        'bfloat16'
    """

    def is_tensor(self, value: object) -> bool:
        """Tell whether a value is a tensor of any kind."""
        return isinstance(value, torch.Tensor)

    def describe(self, tensor: object) -> TensorInfo:
        """Return data type, shape and box.

        Raises:
            StateError: This kind of tensor has no memory, or no boxes.
        """
        assert isinstance(tensor, torch.Tensor)
        if not hp_dtensor.is_dtensor(tensor):
            if type(tensor) not in _PLAIN_TYPES:
                raise StateError(
                    f"a tensor of class {type(tensor).__name__} can't be saved or loaded into. "
                    f"Turn it into a plain tensor or a DTensor."
                )
            _check_memory(tensor)
            shape = tuple(tensor.shape)
            box = Box((0,) * len(shape), shape)
            return TensorInfo(_dtype_name(tensor), shape, box, is_plain=True)
        try:
            box = hp_dtensor.box_of(tensor)
        except (ValueError, NotImplementedError) as error:
            raise StateError(
                f"a DTensor's placements don't say which part each rank holds ({error}). "
                f"Redistribute it to shards or replicas first."
            ) from error
        local = hp_dtensor.local_of(tensor)
        _check_memory(local)
        if tuple(local.shape) != box.sizes:
            raise StateError(
                f"this rank's part of a DTensor has shape {tuple(local.shape)}, but its "
                f"placements say {box.sizes}. Build it with the ceil rule of torch.chunk."
            )
        return TensorInfo(_dtype_name(local), tuple(tensor.shape), box, is_plain=False)

    def view(self, tensor: object) -> np.ndarray | None:
        """Return this rank's part as writable carriers over its own memory; None off the host."""
        local = _local(tensor)
        if local.device.type != "cpu" or local.is_conj() or local.is_neg():
            return None
        values: np.ndarray = local.view(_CARRIERS[local.element_size()]).numpy()
        return values

    def read(self, tensor: object, region: Box) -> np.ndarray:
        """Return a host copy of a region of this rank's part, as carriers."""
        part = _local(tensor)[index_of(region)].resolve_conj().resolve_neg()
        part = part.to("cpu", copy=True, memory_format=torch.contiguous_format)
        values: np.ndarray = part.view(_CARRIERS[part.element_size()]).numpy()
        return values

    def write(self, tensor: object, region: Box, values: np.ndarray) -> None:
        """Overwrite a region of this rank's part by carriers."""
        local = _local(tensor)
        source = torch.from_numpy(values).view(local.dtype)
        local[index_of(region)].copy_(source)

    def touch(self, tensor: object) -> None:
        """Raise the version counter: what autograd saved of the old values is stale."""
        assert isinstance(tensor, torch.Tensor)
        for one in (tensor, _local(tensor)):
            if not one.is_inference():  # inference tensors have no counter
                torch.autograd.graph.increment_version(one)

    def new(self, dtype: str, shape: tuple[int, ...], like: object | None) -> torch.Tensor:
        """Return zeros: laid out like `like` if of its shape, else whole on the host."""
        kind = getattr(torch, dtype)
        if isinstance(like, torch.Tensor) and tuple(like.shape) == shape:
            return torch.zeros_like(like, dtype=kind, requires_grad=False)
        raw = torch.zeros((*shape, kind.itemsize), dtype=torch.uint8)
        return raw.view(kind).reshape(shape)

    def encode(self, value: object) -> tuple[str, Json] | None:
        """Return (tag, content) for a dtype, size or device."""
        if isinstance(value, torch.dtype):
            return "torch_dtype", str(value).removeprefix("torch.")
        if type(value) is torch.Size:
            return "torch_size", list(value)
        if isinstance(value, torch.device):
            return "torch_device", str(value)
        return None

    def decode(self, tag: str, content: Json) -> object:
        """Return the value that `encode` was given.

        Raises:
            ValueError: The content isn't one that `encode` writes.
            KeyError: The tag isn't one of torch's.
        """
        if tag == "torch_dtype" and isinstance(content, str):
            found = getattr(torch, content, None)
            if isinstance(found, torch.dtype):
                return found
        elif tag == "torch_size" and isinstance(content, list):
            lengths = [length for length in content if type(length) is int]
            if len(lengths) == len(content):
                return torch.Size(lengths)
        elif tag == "torch_device" and isinstance(content, str):
            try:
                return torch.device(content)
            except RuntimeError as error:
                raise ValueError(str(error)) from error
        elif tag not in ("torch_dtype", "torch_size", "torch_device"):
            raise KeyError(tag)
        raise ValueError(f"{content!r} is no content of {tag}")


def arrays() -> TorchArrays:
    """Return torch's `Arrays`."""
    return TorchArrays()


def _local(tensor: object) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    local = hp_dtensor.local_of(tensor) if hp_dtensor.is_dtensor(tensor) else tensor
    return local.detach()


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_memory(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise StateError(
            f"a tensor of layout {tensor.layout} can't be saved or loaded into. Save its "
            f"indices and values."
        )
    if tensor.is_quantized or _dtype_name(tensor) not in DTYPES:
        raise StateError(
            f"a tensor of data type {tensor.dtype} can't be saved or loaded into. Save its "
            f"integers (int_repr()) and scales."
        )
    if tensor.device.type == "meta":
        raise StateError(
            "a tensor on the meta device has no memory to save or load into. Call "
            "to_empty(device=...) on its module first."
        )
