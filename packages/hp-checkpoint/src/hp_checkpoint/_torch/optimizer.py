"""Optimizer state by parameter name, so that it fits any number of ranks and any group order.

Reading takes the optimizer's own tensors as they are and never makes, steps or moves anything. What
an optimizer that has not stepped yet lacks, `load` adds from the checkpoint: each parameter's state
is an `OpenDict` laid out like the parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

import hp_dtensor
from hp_checkpoint.errors import MatchError, StateError
from hp_checkpoint.tree import OpenDict

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHOWN = 5


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return an optimizer's state keyed by parameter names; see `hp_checkpoint.optimizer_state`.

    Args:
        model: The module whose parameters are optimized; gives the names.
        optimizer: An optimizer over them.

    Raises:
        StateError: A parameter of the optimizer isn't in the model.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> state = optimizer_state(layer, torch.optim.AdamW(layer.parameters(), lr=0.5))
        >>> state["param_groups"][0]["params"], state["state"]
        (['weight', 'bias'], {'weight': {}, 'bias': {}})
    """
    names = _names(model, optimizer)
    state: dict[object, object] = {
        name: OpenDict(optimizer.state.get(parameter), like=parameter)
        for parameter, name in names.items()
    }
    groups = [
        {
            **group,
            "params": [names[parameter] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, object]
) -> None:
    """Give an optimizer a state that `load` filled; see `hp_checkpoint.load_optimizer_state`.

    Args:
        model: The module whose parameters are optimized; gives the names.
        optimizer: An optimizer over them, with the same groups of names.
        state: From `optimizer_state`, possibly loaded into.

    Raises:
        MatchError: The groups hold other parameters, or states have unknown names; nothing changed.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
        >>> state = optimizer_state(layer, optimizer)
        >>> state["param_groups"][0]["lr"] = 0.25
        >>> load_optimizer_state(layer, optimizer, state)
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """
    names = _names(model, optimizer)
    groups = cast("list[dict[str, object]]", state["param_groups"])
    states = cast("dict[str, dict[str, object]]", state["state"])
    wanted = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    found = [list(cast("list[str]", group["params"])) for group in groups]
    if list(map(sorted, wanted)) != list(map(sorted, found)):
        raise MatchError(
            f"the parameter groups differ: the optimizer has {_groups_text(wanted)}, the state "
            f"{_groups_text(found)}. Build the optimizer over the same groups of parameters."
        )
    unknown = sorted(set(states) - set(names.values()))
    if unknown:
        raise MatchError(f"the state has parameters that the optimizer lacks: {unknown}.")
    for group, loaded in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
        for parameter in group["params"]:
            own = states.get(names[parameter])
            if own:
                optimizer.state[parameter] = _placed(own, parameter, group)
            else:
                optimizer.state.pop(parameter, None)


def _placed(
    own: Mapping[str, object], parameter: torch.Tensor, group: Mapping[str, object]
) -> dict[str, object]:
    """Return a parameter's state with `step` where torch wants it.

    That is on the parameter's device for fused and capturable optimizers, else on the host, and
    never distributed (a parameter without dims has states of the shape of `step`).
    """
    placed = dict(own)
    step = placed.get("step")
    if isinstance(step, torch.Tensor):
        whole = hp_dtensor.local_of(step) if hp_dtensor.is_dtensor(step) else step
        on_device = group.get("fused") or group.get("capturable")
        placed["step"] = whole.to(parameter.device if on_device else "cpu")
    return placed


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of an optimizer, in the model's order."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [tuple(parameter.shape) for parameter in own if parameter not in named]
    if strangers:
        raise StateError(
            f"{len(strangers)} parameters of the optimizer aren't parameters of this model (shapes "
            f"{strangers[:_SHOWN]}). Pass the model that it optimizes, and build the optimizer "
            f"after sharding the model."
        )
    return {parameter: name for parameter, name in named.items() if parameter in own}


def _groups_text(groups: list[list[str]]) -> str:
    sizes = ", ".join(str(len(group)) for group in groups)
    return f"{len(groups)} groups of {sizes} parameters"
