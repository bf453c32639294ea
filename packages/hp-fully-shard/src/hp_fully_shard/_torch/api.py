"""`fully_shard` on torch: validate everything, then change the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from hp_fully_shard._torch.discover import (
    SHARDED_AS,
    Alias,
    Candidate,
    PlacementFn,
    check_modules,
    find_parameters,
)
from hp_fully_shard._torch.hooks import CallHooks
from hp_fully_shard._torch.module import hook_module_methods, sharded_class
from hp_fully_shard._torch.param import ShardedParam
from hp_fully_shard._torch.seeds import check_same_values
from hp_fully_shard._torch.tree import UNITS_ATTRIBUTE
from hp_fully_shard._torch.unit import TorchUnit
from hp_fully_shard.errors import FullyShardError, UnsupportedError
from hp_mesh import DeviceMesh, as_device_mesh, init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hp_fully_shard.policy import MixedPrecisionPolicy

M = TypeVar("M")


def fully_shard(
    module: M,
    *,
    mesh: object | None,
    reshard_after_forward: bool | None,
    shard_placement_fn: PlacementFn | None,
    mp_policy: MixedPrecisionPolicy,
    ignored_params: Iterable[nn.Parameter] | None,
) -> M:
    """Shard torch modules as one unit; see `hp_fully_shard.fully_shard`."""
    modules = check_modules(module)
    _check_options(reshard_after_forward, mp_policy)
    ignored = _check_ignored(ignored_params)
    line = _check_mesh(mesh)
    candidates, aliases = find_parameters(
        modules, ignored=ignored, num_shards=line.size(), placement_fn=shard_placement_fn
    )
    check_same_values([(item.name, item.parameter) for item in candidates], line)
    unit = TorchUnit(
        modules=modules,
        params=[_shard(candidate, line) for candidate in candidates],
        mesh=line,
        policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
    )
    _install(unit, candidates)
    for alias in aliases:
        _join(alias, modules)
    return module


def _check_options(reshard_after_forward: object, policy: object) -> None:
    if not isinstance(reshard_after_forward, (bool, type(None))):
        error = UnsupportedError if isinstance(reshard_after_forward, int) else FullyShardError
        raise error(
            f"reshard_after_forward={reshard_after_forward!r}: this version takes True, False or "
            f"None (automatic); resharding to a smaller group isn't there yet."
        )
    if not hasattr(policy, "param_dtype"):
        raise FullyShardError(
            f"mp_policy is a {type(policy).__name__}. Pass a MixedPrecisionPolicy."
        )
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise FullyShardError(
                f"mp_policy.{field} is {dtype!r}. Pass a floating-point torch.dtype or None."
            )


def _check_ignored(ignored: Iterable[object] | None) -> list[nn.Parameter]:
    parameters: list[nn.Parameter] = []
    for index, item in enumerate(ignored or ()):
        if not isinstance(item, nn.Parameter):
            raise FullyShardError(
                f"ignored_params holds a {type(item).__name__} at position {index}. Pass the "
                f"nn.Parameter objects themselves."
            )
        parameters.append(item)
    return parameters


def _check_mesh(mesh: object | None) -> DeviceMesh:
    if mesh is None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group()
        device = torch.accelerator.current_accelerator()
        kind = device.type if device is not None else "cpu"
        return init_device_mesh(kind, (torch.distributed.get_world_size(),))
    line = as_device_mesh(mesh)
    if line.ndim != 1:
        raise UnsupportedError(
            f"the mesh has {line.ndim} axes of sizes {tuple(line.shape)}; this version shards "
            f"over a 1-D mesh. Pass one axis, for example mesh['shard']."
        )
    return line


def _shard(candidate: Candidate, mesh: DeviceMesh) -> ShardedParam:
    return ShardedParam(
        candidate.parameter,
        candidate.owners,
        mesh=mesh,
        placement=candidate.placement,
        name=candidate.name,
    )


def _install(unit: TorchUnit, candidates: list[Candidate]) -> None:
    """Swap parameters and classes, and register hooks; nothing here is expected to fail."""
    for candidate, param in zip(candidates, unit.params, strict=True):
        param.install()
        setattr(candidate.parameter, SHARDED_AS, (unit, param))
    is_list = len(unit.modules) > 1
    for index, module in enumerate(unit.modules):
        module.__class__ = sharded_class(type(module))
        _serve(unit, module, index if is_list else None, first=True)
        hook_module_methods(module)


def _join(alias: Alias, modules: tuple[nn.Module, ...]) -> None:
    """Let a tied weight's second home see the unit that holds it, in calls of these modules."""
    holder: TorchUnit
    holder, param = getattr(alias.parameter, SHARDED_AS)
    param.owners.append(alias.owner)
    alias.owner.bind(param.sharded)
    for module in modules:
        if holder not in module.__dict__.get(UNITS_ATTRIBUTE, []):
            _serve(holder, module, None, first=False)


def _serve(unit: TorchUnit, module: nn.Module, member: int | None, *, first: bool) -> None:
    units: list[TorchUnit] = module.__dict__.setdefault(UNITS_ATTRIBUTE, [])
    units.insert(0 if first else len(units), unit)
    CallHooks(unit, member).attach(module, first=first)
