"""One parameter of a unit: a sharded DTensor at rest, a plain full tensor during compute.

Note [two parameters, one name]: the optimizer and state dicts see `sharded`, an `nn.Parameter`
that holds a torch DTensor. While the unit is full every owner module sees `full`, an
`nn.Parameter` over the channel's memory, made once per channel so that its identity stays. It is
made from `array.data`: what the channel writes through `array` must not count as an in-place
change of a tensor that autograd saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hp_comm.plan import ParamSpec
from hp_dtensor import Layout, Shard, dtensor_from_local, local_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

    from hp_mesh import DeviceMesh

TORCH_PREFIX = "torch."


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that hp_comm uses for a torch data type.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix(TORCH_PREFIX)


@dataclass(frozen=True, slots=True)
class Owner:
    """A module that holds the parameter under a name."""

    module: nn.Module
    name: str

    def bind(self, parameter: nn.Parameter) -> None:
        """Let the module see this parameter."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter
        else:  # for example nn.RNN keeps its own list of weights
            setattr(self.module, self.name, parameter)


class ShardedParam:
    """A parameter whose shards lie on the ranks of a 1-D mesh.

    Args:
        original: The whole parameter as the user made it; not changed.
        owners: Modules that hold it, with the names under which they do.
        mesh: The 1-D mesh over whose ranks it is sharded.
        placement: Along which dim.
        name: Its name for errors, for example "layers.0.weight".
    """

    def __init__(
        self,
        original: nn.Parameter,
        owners: list[Owner],
        *,
        mesh: DeviceMesh,
        placement: Shard,
        name: str,
    ) -> None:
        self.name = name
        self.owners = owners
        self.shape = tuple(original.shape)
        self.mesh = mesh
        self.layout = Layout(mesh, (placement,))
        self.full: nn.Parameter | None = None
        self._array: torch.Tensor | None = None
        self._accumulated: torch.Tensor | None = None
        self._is_watched = False
        self._gathered: tuple[torch.Tensor, int] | None = None
        self._bound_full: bool | None = None
        self.on_grad: Callable[[], None] | None = None
        self.sharded = self._shard(original)

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, as it is now."""
        return cast("torch.Tensor", local_of(self.sharded))

    @property
    def signature(self) -> tuple[object, ...]:
        """What a channel depends on; when it changes, a new one is opened."""
        return self.sharded.dtype, self.sharded.requires_grad, self.sharded.device.type

    def spec(self, compute: torch.dtype | None, reduce: torch.dtype | None) -> ParamSpec:
        """Describe the parameter to hp_comm; None keeps the parameter's own data type."""
        own = self.sharded.dtype
        changes = own.is_floating_point
        computed = compute if compute is not None and changes else own
        reduced = reduce if reduce is not None and changes else computed
        return ParamSpec(
            name=self.name,
            shape=self.shape,
            boxes=self.layout.boxes(self.shape),
            storage_dtype=dtype_name(own),
            compute_dtype=dtype_name(computed),
            reduce_dtype=dtype_name(reduced),
            trainable=self.sharded.requires_grad,
        )

    def install(self) -> None:
        """Replace the original parameter by the sharded one in every owner."""
        self.bind_sharded()

    def shard_to_gather(self) -> torch.Tensor:
        """Return this rank's shard, and note its version: a later change makes `full` stale."""
        local = self.local
        self._gathered = (local, local._version)
        return local

    def is_stale(self) -> bool:
        """Whether the shard was changed or replaced since it was gathered."""
        if self._gathered is None:
            return False
        local, version = self._gathered
        return local is not self.local or local._version != version

    def bind_sharded(self) -> None:
        """Let every owner see the sharded parameter; it is frozen if the full one was meanwhile."""
        if self.full is not None and self._bound_full not in (None, self.full.requires_grad):
            self.sharded.requires_grad_(self.full.requires_grad)
        self._bound_full = None
        for owner in self.owners:
            owner.bind(self.sharded)

    def bind_full(self, array: torch.Tensor) -> None:
        """Let every owner see the full parameter, which lies in this memory."""
        if self.full is None or self._array is not array:
            self.full = nn.Parameter(array.data, requires_grad=self.sharded.requires_grad)
            self._array = array
            self._is_watched = False
        if self.full.requires_grad != self.sharded.requires_grad:  # frozen or not since then
            self.full.requires_grad_(self.sharded.requires_grad)
        if self.full.requires_grad and not self._is_watched:
            self._is_watched = True
            self.full.register_post_accumulate_grad_hook(self._tell)
        self._bound_full = self.full.requires_grad
        for owner in self.owners:
            owner.bind(self.full)

    def _tell(self, parameter: torch.Tensor) -> None:
        if self.on_grad is not None:
            self.on_grad()

    def has_grad(self) -> bool:
        """Whether the full parameter holds a gradient that nobody took."""
        return self.full is not None and self.full.grad is not None

    def has_accumulated(self) -> bool:
        """Whether gradients of earlier backwards are kept on this rank."""
        return self._accumulated is not None

    def accumulate_grad(self, dtype: torch.dtype | None) -> None:
        """Add the full gradient to the accumulator, which has this data type."""
        if self.full is None or self.full.grad is None:
            return
        grad, self.full.grad = self.full.grad, None
        if self._accumulated is None:
            self._accumulated = grad if dtype is None else grad.to(dtype)
        else:
            self._accumulated.add_(grad)

    def take_grad(self) -> torch.Tensor | None:
        """Hand over the full gradient, the accumulated one included, and forget both."""
        grad = self.full.grad if self.full is not None else None
        if self.full is not None:
            self.full.grad = None
        if self._accumulated is None:
            return grad
        total, self._accumulated = self._accumulated, None
        return total if grad is None else total.add_(grad)

    def drop_grad(self) -> None:
        """Forget the full gradient of a backward that was broken off."""
        if self.full is not None:
            self.full.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Reset the sharded parameter's gradient and what was accumulated for it."""
        self._accumulated = None
        if set_to_none:
            self.sharded.grad = None
        elif self.sharded.grad is not None:
            local_of(self.sharded.grad).zero_()

    def put_grad(self, local: torch.Tensor) -> None:
        """Add this rank's box of the reduced gradient to the sharded parameter's."""
        local = local.to(self.sharded.dtype)
        if self.sharded.grad is not None:
            local_of(self.sharded.grad).add_(local)
        else:
            self.sharded.grad = dtensor_from_local(
                local, self.mesh, self.layout.placements, shape=self.shape
            )
        for hook in (self.sharded._post_accumulate_grad_hooks or {}).values():
            hook(self.sharded)  # the autograd engine sees the full parameter only

    def refresh(self) -> None:
        """Adopt what `module.to(...)` or `to_empty(...)` left in the owner modules."""
        owner = self.owners[0]
        current = owner.module._parameters[owner.name]
        assert current is not None, f"{self.name} was removed from its module"
        self.sharded = current
        for other in self.owners[1:]:
            other.bind(current)
        local = local_of(current)
        if not self._has_room(local):
            cast("DTensor", current)._local_tensor = self._padded(local)
        self.full = self._array = None

    def _shard(self, original: nn.Parameter) -> nn.Parameter:
        box = self.layout.local_box(self.shape)
        device = original.device if original.is_meta else torch.device(self.mesh.device_type)
        part = original.detach()[box.slices()] if self.shape else original.detach()
        local = self._padded(part.to(device))
        tensor = dtensor_from_local(local, self.mesh, self.layout.placements, shape=self.shape)
        sharded = nn.Parameter(tensor, requires_grad=original.requires_grad)
        vars(sharded).update(vars(original))
        return sharded

    def _padded(self, local: torch.Tensor) -> torch.Tensor:
        """Copy a shard into storage that has room for the padding of a gather without copy."""
        storage = torch.zeros(self._room(), dtype=local.dtype, device=local.device)
        shard = storage[: local.numel()].view(local.shape)
        return shard.copy_(local)

    def _has_room(self, local: torch.Tensor) -> bool:
        size_bytes = self._room() * local.element_size()
        return local.is_contiguous() and local.untyped_storage().nbytes() >= size_bytes

    def _room(self) -> int:
        """Return the elements of the largest shard: every shard is padded to it."""
        return max(box.num_elements for box in self.layout.boxes(self.shape))
