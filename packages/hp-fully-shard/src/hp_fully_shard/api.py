"""`fully_shard`: finds the framework of a module and hands over to its adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from hp_fully_shard.errors import FullyShardError
from hp_fully_shard.policy import MixedPrecisionPolicy
from hp_mesh._framework import framework_of, load_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

M = TypeVar("M")


def fully_shard(
    module: M,
    *,
    mesh: object | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[Any], object] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[object] | None = None,
) -> M:
    """Shard the parameters of a module over the ranks of a mesh, in place, as one unit.

    Apply it to inner modules first and to the whole model last: each call makes one unit of the
    parameters that no inner unit holds. A unit's parameters are whole only while it computes. At
    rest `module.parameters()` yields parameters that hold DTensors; build the optimizer after
    this call. Gradients are averaged over the ranks.

    Args:
        module: A module, or a list of modules that are gathered together.
        mesh: A 1-D `hp_mesh.DeviceMesh` (a torch DeviceMesh is accepted); None: all ranks.
        reshard_after_forward: Give the full parameters back after forward and gather them again
            for backward. None: yes, except for the root of the model, whose backward comes at
            once. False holds only until the backward ends: nothing stays full over an optimizer
            step.
        shard_placement_fn: Called with each parameter; returns `Shard(dim)` or None for dim 0.
            Sizes need not divide by the number of ranks.
        mp_policy: Data types of compute, reduction and outputs.
        ignored_params: Parameters to leave as they are: whole on every rank and never reduced.

    Returns:
        The argument itself; its modules are now instances of `HSDPModule` as well.

    Raises:
        FullyShardError: An argument is wrong; nothing was changed.
        UnsupportedError: This version can't do it (for example a 2-D mesh).

    Source: ZeRO stage 3 (Rajbhandari et al., 2020); interface of PyTorch FSDP2.
    """
    probe = module[0] if isinstance(module, (list, tuple)) and module else module
    framework = framework_of(probe)
    if framework is None:
        raise FullyShardError(
            f"fully_shard takes a module of torch, or a list of them; it got "
            f"{type(module).__name__!r} holding {type(probe).__name__!r}. Pass the module object."
        )
    adapter = load_adapter("hp_fully_shard", framework)
    return cast(
        "M",
        adapter.fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy or MixedPrecisionPolicy(),
            ignored_params=ignored_params,
        ),
    )
