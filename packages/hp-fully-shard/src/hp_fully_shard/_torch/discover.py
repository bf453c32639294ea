"""Which parameters a call of `fully_shard` manages, and whether it may.

Everything here only reads; all errors are raised before a module is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hp_dtensor import Shard, from_torch_placement, is_dtensor
from hp_fully_shard._torch.param import Owner
from hp_fully_shard._torch.tree import units_of
from hp_fully_shard.errors import FullyShardError, UnsupportedError

PlacementFn = Callable[[nn.Parameter], object]
SHARDED_AS = "_hp_sharded_as"
"""Attribute of a whole parameter that was sharded: the `(unit, parameter)` that took its place."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A parameter to shard, with everything that holds it."""

    parameter: nn.Parameter
    owners: list[Owner]
    name: str
    placement: Shard


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of a parameter that another unit holds already (a tied weight)."""

    parameter: nn.Parameter
    owner: Owner
    name: str


def check_modules(module: object) -> tuple[nn.Module, ...]:
    """Return the modules to shard as one unit.

    Args:
        module: What the user passed: a module, or a list or tuple of modules.

    Raises:
        FullyShardError: It is neither; the list is empty or names a module twice; a module is
            sharded already, or is a container that is never called.
    """
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise FullyShardError(
            "fully_shard got an empty list. Pass a module or a list of at least one module."
        )
    for index, item in enumerate(modules):
        if not isinstance(item, nn.Module):
            place = f"element {index} of the list" if isinstance(module, (list, tuple)) else "it"
            raise FullyShardError(
                f"fully_shard takes an nn.Module or a list of them; {place} is a "
                f"{type(item).__name__}. Pass the module object."
            )
        _check_module(item)
    if len({id(item) for item in modules}) < len(modules):
        raise FullyShardError(
            "fully_shard got a list that names a module twice. Pass each module once."
        )
    return _outermost(modules)


def _check_module(module: nn.Module) -> None:
    kind = type(module).__name__
    if any(module in unit.modules for unit in units_of(module)):
        raise FullyShardError(
            f"fully_shard was applied to this {kind} before. Apply it once per module; change "
            f"settings later with the set_... methods."
        )
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise FullyShardError(
            f"fully_shard can't hook a {kind}: a container's forward is never called. Apply it to "
            f"each module inside, or pass list(container) to make them one unit."
        )


def _outermost(modules: tuple[nn.Module, ...]) -> tuple[nn.Module, ...]:
    """Leave out the modules that lie inside another one of the list; the order is kept."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return tuple(module for module in modules if id(module) not in inner)


def find_parameters(
    modules: Sequence[nn.Module],
    *,
    ignored: Collection[nn.Parameter],
    num_shards: int,
    placement_fn: PlacementFn | None,
) -> tuple[list[Candidate], list[Alias]]:
    """Return the parameters to shard, and the names of those that another unit holds.

    Args:
        modules: The modules of one unit.
        ignored: Parameters to leave alone.
        num_shards: Size of the mesh.
        placement_fn: Chooses the dim to shard; None, or a result of None: dim 0.

    Raises:
        FullyShardError: A parameter can't be sharded as asked; the message names it.
        UnsupportedError: A parameter is a DTensor already, or a scalar.
    """
    skip = {id(parameter) for parameter in ignored}
    found: dict[int, Candidate] = {}
    aliases: list[Alias] = []
    for name, owner, parameter in _named_parameters(modules):
        if id(parameter) in skip:
            continue
        if hasattr(parameter, SHARDED_AS):
            aliases.append(Alias(parameter, owner, name))
        elif id(parameter) in found:
            found[id(parameter)].owners.append(owner)
        else:
            _check_parameter(name, parameter)
            placement = _placement(name, parameter, placement_fn)
            found[id(parameter)] = Candidate(parameter, [owner], name, placement)
    return list(found.values()), aliases


def _named_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Owner, nn.Parameter]]:
    """Yield every parameter that no unit inside holds, once for each name it has."""
    seen: set[int] = set()
    for module in modules:
        for prefix, child in _walk(module, ""):
            if id(child) in seen:
                continue
            seen.add(id(child))
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    yield f"{prefix}{name}", Owner(child, name), parameter


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and all inside, without those that are sharded units themselves."""
    yield prefix, module
    for name, child in module.named_children():
        if not any(child in unit.modules for unit in units_of(child)):
            yield from _walk(child, f"{prefix}{name}.")


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_dtensor(parameter):
        raise UnsupportedError(
            f"parameter {name!r} is a DTensor already (tensor parallelism). This version shards "
            f"plain parameters only; put it into ignored_params, or shard before parallelising."
        )
    if parameter.dim() == 0:
        raise UnsupportedError(
            f"parameter {name!r} is a scalar, which has no dim to shard. Give it the shape (1,), "
            f"or put it into ignored_params."
        )
    if parameter.layout is not torch.strided:
        raise UnsupportedError(
            f"parameter {name!r} has the layout {parameter.layout}; only dense parameters can be "
            f"sharded. Put it into ignored_params."
        )


def _placement(name: str, parameter: nn.Parameter, placement_fn: PlacementFn | None) -> Shard:
    chosen = placement_fn(parameter) if placement_fn is not None else None
    if chosen is None:
        return Shard(0)
    placement = chosen if isinstance(chosen, Shard) else _from_torch(name, chosen)
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise FullyShardError(
            f"shard_placement_fn asked to shard parameter {name!r} of shape "
            f"{tuple(parameter.shape)} on dim {placement.dim}. Return Shard(d) with d in "
            f"[0, {parameter.dim()})."
        )
    return Shard(dim)


def _from_torch(name: str, chosen: object) -> Shard:
    placement = from_torch_placement(chosen)
    if isinstance(placement, Shard):
        return placement
    raise FullyShardError(
        f"shard_placement_fn returned {chosen!r} for parameter {name!r}. Return Shard(d), or None "
        f"for dim 0."
    )
