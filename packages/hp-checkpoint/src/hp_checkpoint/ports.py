"""What saving and loading ask of a framework and of the other ranks.

The core sees names, boxes and bytes. A tensor stays an opaque object that only `Arrays` opens, and
what comes out of one are numpy arrays of unsigned integers with the tensor's bits ("carriers").

    port      who provides it                                  who asks
    Peers     hp_comm's communicators, `Alone`                 save, load
    Arrays    _torch, testing (numpy), `NoArrays`              flattening, writer, loader
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from hp_mesh import Box

Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What there is to know of a tensor without reading it."""

    dtype: str
    """Name of the data type, for example "bfloat16"."""
    shape: tuple[int, ...]
    """Lengths of the full tensor's dims, in elements."""
    box: Box
    """Which part of it this process holds; may be empty."""
    is_plain: bool
    """Whether it is an ordinary tensor: whole on this rank, and other ranks may differ."""


class Peers(Protocol):
    """The ranks that save or load together. Every `hp_comm.Communicator` is one."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, by group index."""
        ...

    @property
    def index(self) -> int:
        """This process's index in `ranks`."""
        ...

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes (any length, also 0), by group index."""
        ...


class Arrays(Protocol):
    """A framework's tensors and the plain values that only the framework knows."""

    def is_tensor(self, value: object) -> bool:
        """Tell whether a value is a tensor of this framework."""
        ...

    def describe(self, tensor: object) -> TensorInfo:
        """Return data type, shape and box.

        Raises:
            StateError: This kind of tensor has no boxes (sparse, quantised, partial sums ...).
        """
        ...

    def view(self, tensor: object) -> np.ndarray | None:
        """Return this rank's part as writable carriers over its own memory; None off the host."""
        ...

    def read(self, tensor: object, region: Box) -> np.ndarray:
        """Return a host copy of a region, given relative to this rank's part, as carriers."""
        ...

    def write(self, tensor: object, region: Box, values: np.ndarray) -> None:
        """Overwrite a region, given relative to this rank's part, by carriers."""
        ...

    def touch(self, tensor: object) -> None:
        """Tell the framework that memory from `view` was written."""
        ...

    def new(self, dtype: str, shape: tuple[int, ...], like: object | None) -> object:
        """Return new zeros: laid out like `like` if of its shape, else whole on the host."""
        ...

    def encode(self, value: object) -> tuple[str, Json] | None:
        """Return (tag, content) for a plain value of the framework, None for any other value."""
        ...

    def decode(self, tag: str, content: Json) -> object:
        """Return the value that `encode` was given.

        Raises:
            ValueError: The content isn't one that `encode` writes.
            KeyError: The tag isn't one of this framework's.
        """
        ...


class Alone:
    """The only rank there is.

    Example:
        >>> Alone().all_gather_bytes(b"hello")
        [b'hello']
    """

    ranks: tuple[int, ...] = (0,)
    index: int = 0

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return the value itself, in a list."""
        return [value]


class NoArrays:
    """No framework: there are no tensors, only plain values.

    Example:
        >>> NoArrays().is_tensor(3)
        False
    """

    def is_tensor(self, value: object) -> bool:
        """Return False."""
        return False

    def describe(self, tensor: object) -> TensorInfo:
        """Never called: nothing is a tensor."""
        raise NotImplementedError

    def view(self, tensor: object) -> np.ndarray | None:
        """Never called: nothing is a tensor."""
        raise NotImplementedError

    def read(self, tensor: object, region: Box) -> np.ndarray:
        """Never called: nothing is a tensor."""
        raise NotImplementedError

    def write(self, tensor: object, region: Box, values: np.ndarray) -> None:
        """Never called: nothing is a tensor."""
        raise NotImplementedError

    def touch(self, tensor: object) -> None:
        """Never called: nothing is a tensor."""
        raise NotImplementedError

    def new(self, dtype: str, shape: tuple[int, ...], like: object | None) -> object:
        """Never called: `load_full` asks for a framework first."""
        raise NotImplementedError

    def encode(self, value: object) -> tuple[str, Json] | None:
        """Return None."""
        return None

    def decode(self, tag: str, content: Json) -> object:
        """Raise KeyError: no tag is known."""
        raise KeyError(tag)
