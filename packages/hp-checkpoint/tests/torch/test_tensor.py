"""torch tensors of every kind through one process."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import hp_checkpoint
from hp_checkpoint.dtype import DTYPES

if TYPE_CHECKING:
    from pathlib import Path


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def random_tensor(dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    top = 2 if dtype == "bool" else 256
    raw = torch.randint(0, top, (*shape, kind.itemsize), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


def test_dtypes_are_all_of_torchs_but_quantised_ones() -> None:
    known = {
        str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)
    }

    assert known - set(DTYPES) == {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    assert {name: getattr(torch, name).itemsize for name in DTYPES} == {
        name: dtype.itemsize for name, dtype in DTYPES.items()
    }


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 2)], ids=str)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_tensor_of_any_type_comes_back_bitwise(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    value = random_tensor(dtype, *shape)
    target = random_tensor(dtype, *shape)
    hp_checkpoint.save({"t": value}, tmp_path)

    hp_checkpoint.load({"t": target}, tmp_path)
    full: Any = hp_checkpoint.load_full(tmp_path)["t"]

    assert bits(target) == bits(value)
    assert (full.dtype, full.shape, bits(full)) == (value.dtype, value.shape, bits(value))


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
VIEWS = {
    "transposed": BASE.t(),
    "strided": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(5, 6),
    "shared": BASE[1:],
    "conjugate": torch.complex(BASE, BASE + 1).conj(),
    "negative": torch.complex(BASE, BASE).conj().imag,
    "grad": BASE.clone().requires_grad_(),
    "parameter": nn.Parameter(BASE.clone()),
    "buffer": nn.Buffer(BASE.clone()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_tensor_of_any_memory_comes_back_equal(tmp_path: Path, name: str) -> None:
    hp_checkpoint.save({"t": VIEWS[name]}, tmp_path)

    full: Any = hp_checkpoint.load_full(tmp_path)["t"]

    assert torch.equal(full, VIEWS[name].detach())


def test_load_into_views_writes_their_elements_only(tmp_path: Path) -> None:
    hp_checkpoint.save({"t": torch.ones(2, 2), "u": torch.full((6, 4), 2.0)}, tmp_path)
    whole, other = torch.zeros(4, 6), torch.zeros(4, 6)

    hp_checkpoint.load({"t": whole[::2, 1::3], "u": other.t()}, tmp_path)

    expected = torch.zeros(4, 6)
    expected[::2, 1::3] = 1
    assert torch.equal(whole, expected)
    assert bool((other == 2).all())


def test_load_keeps_parameters_and_raises_their_version(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    hp_checkpoint.save({"model": layer.state_dict()}, tmp_path)
    target = nn.Linear(3, 2)
    weight = target.weight
    loss = (target.weight * target.weight).sum()

    hp_checkpoint.load({"model": target.state_dict()}, tmp_path)

    assert target.weight is weight
    assert torch.equal(weight, layer.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_save_writes_what_the_safetensors_library_loads(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 2), "b": torch.randn(4, dtype=torch.bfloat16)}
    hp_checkpoint.save(state, tmp_path)

    found = safetensors.torch.load_file(next(tmp_path.glob("*.safetensors")))

    assert set(found) == {"w", "b"}
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])


def test_save_writes_no_pickle(tmp_path: Path) -> None:
    hp_checkpoint.save({"w": torch.randn(3), "v": ("text", 1, None)}, tmp_path)

    for file in tmp_path.iterdir():
        with pytest.raises((pickle.UnpicklingError, EOFError, KeyError, ValueError)):
            pickle.loads(file.read_bytes())


class Odd(torch.Tensor):
    """A subclass with a meaning of its own."""


REFUSED = {
    "sparse": (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
    "meta": (torch.empty(3, device="meta"), "meta device"),
    "subclass": (torch.zeros(3).as_subclass(Odd), "class Odd"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_without_plain_memory_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensor, text = REFUSED[name]

    with pytest.raises(hp_checkpoint.StateError, match=f"^a/{name}: .*{text}"):
        hp_checkpoint.save({"a": {name: tensor}}, tmp_path / "step")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensor_that_is_quantised_is_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)

    with pytest.raises(hp_checkpoint.StateError, match=r"^q: .*qint8.*int_repr"):
        hp_checkpoint.save({"q": tensor}, tmp_path)


def test_load_into_a_meta_tensor_is_refused_by_name(tmp_path: Path) -> None:
    hp_checkpoint.save({"w": torch.zeros(3), "v": torch.ones(2)}, tmp_path)
    other = torch.zeros(2)

    with pytest.raises(hp_checkpoint.MatchError, match=r"w: can't be loaded into: .*to_empty"):
        hp_checkpoint.load({"w": torch.empty(3, device="meta"), "v": other}, tmp_path)

    assert not other.any()


def test_values_of_torch_come_back_with_their_type(tmp_path: Path) -> None:
    values = {
        "dtype": torch.float8_e5m2,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "mixed": (torch.int8, [torch.Size([])]),
    }
    hp_checkpoint.save(values, tmp_path)

    found: Any = hp_checkpoint.load_full(tmp_path)

    assert found == values
    assert type(found["size"]) is torch.Size


def test_random_states_come_back(tmp_path: Path) -> None:
    torch.manual_seed(3)
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # what users have
    }
    hp_checkpoint.save(states, tmp_path)
    expected = torch.rand(3)
    torch.manual_seed(4)

    found: Any = hp_checkpoint.load_full(tmp_path)
    torch.set_rng_state(found["torch"])

    assert torch.equal(torch.rand(3), expected)
    assert found["python"] == random.getstate()


def test_optimizer_state_dict_of_torch_round_trips_as_it_is(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.1), weight_decay=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state: Any = optimizer.state_dict()
    hp_checkpoint.save({"optimizer": state}, tmp_path)

    found: Any = hp_checkpoint.load_full(tmp_path)["optimizer"]

    assert list(found["state"]) == [0, 1]
    assert torch.equal(found["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert float(found["state"][1]["step"]) == 1
    assert found["param_groups"][0]["params"] == [0, 1]
    assert found["param_groups"][0]["betas"] == (0.9, 0.999)
    assert torch.equal(found["param_groups"][0]["lr"], torch.tensor(0.1))


def test_load_full_gives_the_kinds_of_containers_back(tmp_path: Path) -> None:
    state = {"m": OrderedDict(a=torch.ones(1)), "t": (torch.zeros(1), [1, {}]), "e": OrderedDict()}
    hp_checkpoint.save(state, tmp_path)

    found: Any = hp_checkpoint.load_full(tmp_path)

    assert type(found["m"]) is OrderedDict
    assert type(found["t"]) is tuple
    assert found["t"][1] == [1, {}]
    assert type(found["e"]) is OrderedDict
