"""Walks the tensors inside the inputs and outputs of a module, whatever holds them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: T) -> T:
    """Return the value with every tensor inside replaced by what the function returns.

    Goes through tuples (named ones too), lists, dicts of any class, sets and dataclasses; other
    objects are returned as they are. Containers in which nothing changed keep their identity.

    Args:
        function: Called once per tensor found.
        value: Any structure.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": (torch.tensor(1), "text")})
        {'x': (tensor(2), 'text')}
    """
    return cast("T", _map(function, value))


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor inside a structure, in a fixed order.

    Example:
        >>> [int(t) for t in tensors_in([torch.tensor(1), {"a": torch.tensor(2)}])]
        [1, 2]
    """
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, item in _items(value):
            yield from tensors_in(item)


def _items(value: object) -> list[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> object:
    if isinstance(value, torch.Tensor):
        return function(value)
    items = _items(value)
    mapped = [(key, _map(function, item)) for key, item in items]
    if all(new is old for (_, new), (_, old) in zip(mapped, items, strict=True)):
        return value
    if isinstance(value, Mapping):
        return _mapping_like(value, dict(mapped))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        make = cast(
            "Callable[..., object]", type(value)
        )  # a named tuple takes its fields one by one
        return make(*[item for _, item in mapped])
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value)(item for _, item in mapped)
    changed = copy.copy(value)
    for name, item in mapped:
        object.__setattr__(changed, cast("str", name), item)
    return changed


def _mapping_like(value: Mapping[object, object], items: dict[object, object]) -> object:
    if type(value) is dict:
        return items
    changed = copy.copy(value)
    for key, item in items.items():
        changed[key] = item  # type: ignore[index]  # a mapping that can't be written says so
    return changed
