"""The executor's view of a unit's tensors on torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_comm.ports import Array
    from hp_fully_shard._torch.param import ShardedParam


class TorchBinding:
    """Implements `hp_fully_shard.ports.Binding` over a list of parameters.

    Args:
        params: The unit's parameters, by plan index.
        accumulate_dtype: Type in which gradients are kept between micro-batches; None: their own.
    """

    def __init__(self, params: list[ShardedParam], accumulate_dtype: torch.dtype | None) -> None:
        self._params = params
        self._accumulate_dtype = accumulate_dtype

    def shards(self) -> Sequence[Array]:
        """Return this rank's shards as they are now."""
        return [cast("Array", param.shard_to_gather()) for param in self._params]

    def is_stale(self) -> bool:
        """Whether any shard was changed since the full parameters were gathered."""
        return any(param.is_stale() for param in self._params)

    def bind_full(self, full: Sequence[Array]) -> None:
        """Let the modules see the full parameters."""
        for param, array in zip(self._params, full, strict=True):
            param.bind_full(cast("torch.Tensor", array))

    def rebind_full(self) -> None:
        """Let the modules see the full parameters of the running gather again."""
        for param in self._params:
            if param.full is not None:
                for owner in param.owners:
                    owner.bind(param.full)

    def bind_shards(self) -> None:
        """Let the modules see the sharded parameters."""
        for param in self._params:
            param.bind_sharded()

    def has_grads(self) -> bool:
        """Whether any full parameter holds a gradient that nobody took."""
        return any(param.has_grad() for param in self._params)

    def has_accumulated(self) -> bool:
        """Whether any parameter keeps gradients of earlier backwards on this rank."""
        return any(param.has_accumulated() for param in self._params)

    def take_grads(self) -> list[Array | None]:
        """Hand over the full gradients, accumulated ones included, and forget them."""
        return [cast("Array | None", param.take_grad()) for param in self._params]

    def accumulate_grads(self) -> None:
        """Move the full gradients of this backward to the accumulators."""
        with torch.no_grad():
            for param in self._params:
                param.accumulate_grad(self._accumulate_dtype)

    @torch.no_grad()
    def put_grads(self, grads: Sequence[Array | None]) -> None:
        """Add reduced gradients to those of the sharded parameters."""
        for param, grad in zip(self._params, grads, strict=True):
            if grad is not None:
                param.put_grad(cast("torch.Tensor", grad))

    def discard_grads(self) -> None:
        """Drop full gradients that were not accumulated."""
        for param in self._params:
            param.drop_grad()
