"""What every sharded module can do, whichever framework it belongs to."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class HSDPModule:
    """A module that `fully_shard` was applied to; made by it, never by hand.

    Method names are those of PyTorch FSDP2's `FSDPModule`. (No metaclass, so that a module whose
    class has one can be sharded.)
    """

    @abstractmethod
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make this unit's parameters whole; all ranks must call it.

        Args:
            async_op: Only start it, and return a handle to wait for.
        """

    @abstractmethod
    def reshard(self) -> None:
        """Let the modules see the shards again and give the full parameters back."""

    @abstractmethod
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, recurse: bool = True
    ) -> None:
        """Choose whether the next backward reduces gradients or keeps them on this rank."""

    @abstractmethod
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the full parameters are given back after forward."""

    @abstractmethod
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, recurse: bool = True
    ) -> None:
        """Choose whether the full parameters are given back after backward."""

    @abstractmethod
    def set_modules_to_forward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Gather these units as soon as this one's forward starts."""

    @abstractmethod
    def set_modules_to_backward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Gather these units as soon as this one's backward starts."""

    @abstractmethod
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by this instead of the number of ranks."""

    @abstractmethod
    def reset_iter_state(self, recursive: bool = True) -> None:
        """Forget a half-run iteration: units are freed, unreduced gradients dropped."""


class UnshardHandle:
    """A gather that was started by `unshard(async_op=True)`."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the parameters are whole; a second call does nothing."""
