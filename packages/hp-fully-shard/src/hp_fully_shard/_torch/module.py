"""The class that a sharded torch module gets: its own class, FSDP2's, and our methods.

A sharded module is a real instance of torch's `FSDPModule`, because accelerate, Lightning,
transformers and torch's pipelining test for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import UnshardHandle as FSDPUnshardHandle

from hp_fully_shard._torch.tree import Tree, settle, units_of
from hp_fully_shard.errors import FullyShardError, UnsupportedError
from hp_fully_shard.module import HSDPModule, UnshardHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hp_fully_shard._torch.unit import TorchUnit
    from hp_fully_shard.scheduler import UnitSettings

CLASS_PREFIX = "HSDP"


class TorchHSDPModule(HSDPModule, FSDPModule):
    """A sharded torch module."""

    @property
    def _hp_unit(self) -> TorchUnit:
        return units_of(cast("nn.Module", self))[0]

    def unshard(self, async_op: bool = False) -> TorchUnshardHandle | None:
        """Make this unit's parameters whole; all ranks must call it."""
        _check_bool("unshard", "async_op", async_op)
        handle = TorchUnshardHandle(self)
        tree, number = self._hp_tree()
        tree.run(tree.scheduler.unshard(number, wait=not async_op))
        return handle if async_op else None

    def reshard(self) -> None:
        """Let the modules see the shards again and give the full parameters back."""
        place = self._hp_unit.place
        if place is not None:
            place.tree.run(place.tree.scheduler.reshard(place.number))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, recurse: bool = True
    ) -> None:
        """Choose whether the next backward reduces gradients or keeps them on this rank."""
        name = "set_requires_gradient_sync"
        _check_bool(name, "requires_gradient_sync", requires_gradient_sync)
        for settings in self._hp_settings(name, recurse):
            settings.sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether the full parameters are given back after forward."""
        name = "set_reshard_after_forward"
        _check_bool(name, "reshard_after_forward", reshard_after_forward)
        for unit in self._hp_below(name, recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, recurse: bool = True
    ) -> None:
        """Choose whether the full parameters are given back after backward."""
        name = "set_reshard_after_backward"
        _check_bool(name, "reshard_after_backward", reshard_after_backward)
        for settings in self._hp_settings(name, recurse):
            settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(  # type: ignore[override]  # tuples are taken too
        self, modules: Sequence[HSDPModule]
    ) -> None:
        """Gather these units as soon as this one's forward starts."""
        self._hp_unit.forward_prefetch = _units("set_modules_to_forward_prefetch", modules)
        self._hp_resolve()

    def set_modules_to_backward_prefetch(  # type: ignore[override]  # tuples are taken too
        self, modules: Sequence[HSDPModule]
    ) -> None:
        """Gather these units as soon as this one's backward starts."""
        self._hp_unit.backward_prefetch = _units("set_modules_to_backward_prefetch", modules)
        self._hp_resolve()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by this instead of the number of ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise FullyShardError(
                f"set_gradient_divide_factor got {factor!r}. Pass a number above 0."
            )
        self._hp_unit.divide_factor = float(factor)
        self._hp_unit.executed.factor = 1.0 / float(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accept FSDP2's switch: parameters unused on some ranks always get the right mean."""
        name = "set_reduce_scatter_unused_params"
        _check_bool(name, "reduce_scatter_unused_params", reduce_scatter_unused_params)

    def reset_iter_state(self, recursive: bool = True) -> None:
        """Forget a half-run iteration: units are freed, unreduced gradients dropped."""
        _check_bool("reset_iter_state", "recursive", recursive)
        for unit in self._hp_below("reset_iter_state", recursive):
            if unit.place is not None and unit.place.tree.root is unit:
                unit.place.tree.run(unit.place.tree.scheduler.reset())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients, those of sharded parameters also while they are full."""
        for unit in self._hp_below("zero_grad", recurse=True):
            settle(unit)
            for param in unit.params:
                param.zero_grad(set_to_none)
        nn.Module.zero_grad(cast("nn.Module", self), set_to_none)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Convert the shards, as `module.to(...)` asks, and adopt the results."""
        self.reshard()
        result: nn.Module = nn.Module._apply(cast("nn.Module", self), fn, recurse)
        for unit in units_of(cast("nn.Module", self)):
            for param in unit.params:
                param.refresh()
        return result

    def _hp_tree(self) -> tuple[Tree, int]:
        unit = self._hp_unit
        if unit.place is None:
            Tree(cast("nn.Module", self))
        assert unit.place is not None, "a tree gives each of its units a place"
        return unit.place.tree, unit.place.number

    def _hp_below(self, method: str, recurse: bool) -> list[TorchUnit]:
        _check_bool(method, "recurse", recurse)
        if not recurse:
            return [self._hp_unit]
        module = cast("nn.Module", self)
        return list(dict.fromkeys(u for child in module.modules() for u in units_of(child)))

    def _hp_settings(self, method: str, recurse: bool) -> list[UnitSettings]:
        return [unit.settings for unit in self._hp_below(method, recurse)]

    def _hp_resolve(self) -> None:
        if self._hp_unit.place is not None:
            self._hp_unit.place.tree.resolve_prefetch()


class TorchUnshardHandle(UnshardHandle, FSDPUnshardHandle):
    """Waits for a gather that `unshard(async_op=True)` started."""

    def __init__(self, module: TorchHSDPModule) -> None:
        self._module: TorchHSDPModule | None = module

    def wait(self) -> None:
        """Wait until the parameters are whole; a second call does nothing."""
        module, self._module = self._module, None
        if module is not None:
            module.unshard()


def _unsupported(name: str) -> Callable[..., object]:
    def method(self: object, *args: object, **kwargs: object) -> object:
        raise UnsupportedError(
            f"{name} isn't supported by this version of fully_shard. The methods that are: "
            f"{', '.join(sorted(SUPPORTED))}."
        )

    method.__name__ = name
    method.__doc__ = "Raise `UnsupportedError`: FSDP2 has this method, this version does not."
    return method


SUPPORTED = frozenset(name for name in vars(TorchHSDPModule) if not name.startswith("_"))
for _name in vars(FSDPModule):
    if not _name.startswith("_") and _name not in SUPPORTED:
        setattr(TorchHSDPModule, _name, _unsupported(_name))


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""One class per original class, so that two sharded modules of a class have one class, too."""


def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module of this class gets when it is sharded.

    Example:
        >>> sharded_class(nn.Linear).__name__
        'HSDPLinear'
    """
    if original in _CLASSES:
        return _CLASSES[original]
    bases = (TorchHSDPModule, original)
    made = type(f"{CLASS_PREFIX}{original.__name__}", bases, {"__module__": original.__module__})
    # torch's FSDPModule.__new__ makes an instance of the class at this index
    made._orig_cls_mro_index = made.__mro__.index(original)  # type: ignore[attr-defined]  # torch's name
    _CLASSES[original] = cast("type[nn.Module]", made)
    return _CLASSES[original]


def hook_module_methods(module: nn.Module) -> None:
    """Let `state_dict` of a module show the shards, also while the unit is full."""
    module.register_state_dict_pre_hook(_show_shards)
    module.register_state_dict_post_hook(_show_full_again)
    module.register_load_state_dict_pre_hook(_prepare_load)
    module.register_load_state_dict_post_hook(_adopt_loaded)


def _show_shards(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for unit in units_of(module):
        unit.binding.bind_shards()


def _show_full_again(module: nn.Module, state: object, prefix: str, metadata: object) -> None:
    for unit in units_of(module):
        if unit.place is not None and unit.place.tree.scheduler.is_full(unit.place.number):
            unit.binding.rebind_full()


def _prepare_load(module: nn.Module, *args: object) -> None:
    """Free the full parameters before shards are loaded: they would go stale."""
    for unit in units_of(module):
        if unit.place is not None:
            unit.place.tree.run(unit.place.tree.scheduler.reshard(unit.place.number))


def _adopt_loaded(module: nn.Module, incompatible: object) -> None:
    """Take over parameters that `load_state_dict(assign=True)` has replaced."""
    for unit in units_of(module):
        for param in unit.params:
            param.refresh()


def _check_bool(method: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise FullyShardError(f"{method} got {name}={value!r}. Pass True or False.")


def _units(method: str, modules: object) -> list[TorchUnit]:
    if not isinstance(modules, (list, tuple)):
        raise FullyShardError(
            f"{method} takes a list of sharded modules; it got a {type(modules).__name__}."
        )
    for index, module in enumerate(modules):
        if not isinstance(module, HSDPModule):
            raise FullyShardError(
                f"{method} got a {type(module).__name__} at position {index}, which isn't sharded."
                f" Apply fully_shard to it first."
            )
    return [units_of(module)[0] for module in modules]
