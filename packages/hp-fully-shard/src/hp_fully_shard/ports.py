"""What the executor asks of a framework adapter: where a unit's tensors are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hp_comm.ports import Array

Span = Callable[[str], AbstractContextManager[object]]
"""Makes a named range for the framework's profiler."""


class Binding(Protocol):
    """One unit's parameters as the framework's modules hold them; index = plan index."""

    def shards(self) -> Sequence[Array]:
        """Return this rank's shards as they are now."""
        ...

    def bind_full(self, full: Sequence[Array]) -> None:
        """Let the modules see the full parameters."""
        ...

    def bind_shards(self) -> None:
        """Let the modules see the sharded parameters."""
        ...

    def take_grads(self) -> list[Array | None]:
        """Hand over the full gradients, accumulated ones included, and forget them."""
        ...

    def accumulate_grads(self) -> None:
        """Move the full gradients of this backward to the unit's accumulators."""
        ...

    def put_grads(self, grads: Sequence[Array | None]) -> None:
        """Add reduced gradients to those of the sharded parameters."""
        ...

    def discard_grads(self) -> None:
        """Drop full gradients that were not accumulated."""
        ...
