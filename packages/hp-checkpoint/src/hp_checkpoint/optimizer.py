"""The public functions for optimizer state: hand over to the framework's adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hp_checkpoint.errors import StateError
from hp_mesh._framework import Framework, framework_of, load_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping


def optimizer_state(model: object, optimizer: object) -> dict[str, object]:
    """Return an optimizer's state keyed by parameter names, to be saved or loaded into.

    The optimizer isn't changed, and its tensors aren't copied: `load` fills them in place. If it
    has not stepped yet, its state is empty, is saved as empty, and `load` adds what the checkpoint
    holds, laid out like the parameters. So one call serves before a save and before a load:

        save({"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}, path)

        state = {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}
        load(state, path)
        load_optimizer_state(model, optimizer, state["optimizer"])

    Args:
        model: The module whose parameters are optimized; gives the names.
        optimizer: An optimizer over them.

    Returns:
        `{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`.

    Raises:
        StateError: A parameter of the optimizer isn't in the model.
    """
    adapter = load_adapter("hp_checkpoint", _framework_of(model))
    return cast("dict[str, object]", adapter.optimizer_state(model, optimizer))


def load_optimizer_state(model: object, optimizer: object, state: Mapping[str, object]) -> None:
    """Give an optimizer the state that `load` filled.

    Args:
        model: The module whose parameters are optimized; gives the names.
        optimizer: An optimizer over them, with the same groups of names.
        state: From `optimizer_state`, loaded into.

    Raises:
        MatchError: The groups hold other parameters, or states have unknown names; nothing changed.
    """
    adapter = load_adapter("hp_checkpoint", _framework_of(model))
    adapter.load_optimizer_state(model, optimizer, state)


def _framework_of(model: object) -> Framework:
    found = framework_of(model)
    if found is None:
        raise StateError(
            f"expected a module of a framework, found {type(model).__name__}. Pass the model."
        )
    return found
