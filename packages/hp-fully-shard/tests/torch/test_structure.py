"""Tensors are found and replaced in whatever structure holds them."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from hp_fully_shard._torch.hooks import cast_floating
from hp_fully_shard._torch.structure import map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])  # users pass such ones


@dataclass(frozen=True)
class Batch:
    """An input in a dataclass."""

    x: torch.Tensor
    name: str = "batch"


ONE = torch.ones(2)
STRUCTURES = {
    "tensor": ONE,
    "tuple": (ONE, 3),
    "list": [ONE, [ONE]],
    "named tuple": Pair(ONE, "text"),
    "dict": {"x": ONE, "n": None},
    "ordered dict": OrderedDict(x=ONE),
    "dataclass": Batch(ONE),
    "mixed": {"a": [Batch(ONE), (ONE, {"b": Pair(1, ONE)})]},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_map_replaces_every_tensor_and_keeps_types(name: str) -> None:
    value = STRUCTURES[name]
    changed = map_tensors(lambda t: t + 1, value)
    assert type(changed) is type(value)
    found = list(tensors_in(changed))
    assert len(found) == len(list(tensors_in(value)))
    assert all(torch.equal(t, ONE + 1) for t in found)
    assert all(torch.equal(t, ONE) for t in tensors_in(value)), "the original is untouched"


@pytest.mark.parametrize("name", STRUCTURES)
def test_map_without_change_returns_the_same_object(name: str) -> None:
    assert map_tensors(lambda t: t, STRUCTURES[name]) is STRUCTURES[name]


def test_cast_leaves_integers_alone() -> None:
    integers = torch.arange(3)
    changed = cast_floating(Batch(ONE), torch.bfloat16)
    assert changed.x.dtype == torch.bfloat16
    assert cast_floating([integers], torch.bfloat16)[0] is integers
