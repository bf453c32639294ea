"""State dicts to leaves and back."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_checkpoint.errors import ManifestError, StateError
from hp_checkpoint.testing import NumpyArrays, plain
from hp_checkpoint.tree import (
    OpenDict,
    assemble,
    flatten,
    path_from_json,
    path_to_json,
    replace_values,
)

ARRAYS = NumpyArrays()


def names(state: dict[object, object]) -> list[str]:
    return [leaf.name for leaf in flatten(state, ARRAYS)]


def test_flatten_keeps_lists_without_tensors_whole() -> None:
    assert names({"groups": [{"lr": 1}, {"lr": 2}], "pair": (1, 2)}) == ["groups", "pair"]


def test_flatten_opens_lists_with_tensors() -> None:
    state = {"groups": [{"lr": plain(np.zeros(1)), "eps": 1}, 3]}

    assert names(state) == ["groups/[0]/lr", "groups/[0]/eps", "groups/[1]"]


def test_flatten_keeps_empty_containers_as_values() -> None:
    assert names({"a": {}, "b": [], "c": ()}) == ["a", "b", "c"]


def test_flatten_names_differ_for_number_and_text_keys() -> None:
    assert names({0: 1, "0": 2, "[0]": 3, "a/b": 4, "a": {"b": 5}}) == [
        "[0]",
        "0",
        "~20]",
        "a~1b",
        "a/b",
    ]


def test_flatten_of_the_reserved_name_of_safetensors_is_escaped() -> None:
    assert names({"__metadata__": 1}) == ["~3metadata__"]


def test_flatten_of_something_else_than_a_dict_is_refused() -> None:
    with pytest.raises(StateError, match="a state dict is a dict, found list"):
        flatten([1], ARRAYS)  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("key", [object(), frozenset(), "\ud800", (1, object())], ids=repr)
def test_flatten_of_a_key_of_another_type_is_refused(key: object) -> None:
    with pytest.raises(StateError, match=r"^outer: a key of type .* can't be saved"):
        flatten({"outer": {key: 1}}, ARRAYS)


def test_flatten_of_a_dict_in_itself_is_refused() -> None:
    state: dict[object, object] = {}
    state["self"] = state

    with pytest.raises(StateError, match="nested more than 100 deep"):
        flatten(state, ARRAYS)


nested = st.recursive(
    st.integers() | st.just(()) | st.builds(lambda: plain(np.zeros(1))),
    lambda inner: (
        st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, min_size=1)
        | st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, min_size=1).map(OrderedDict)
    ),
    max_leaves=10,
)


@settings(deadline=None)  # other work on the machine is no fault
@given(st.dictionaries(st.text(max_size=3), nested))
def test_assemble_of_the_leaves_gives_the_state_back(state: dict[object, object]) -> None:
    leaves = flatten(state, ARRAYS)

    found = assemble([(leaf.path, leaf.value) for leaf in leaves])

    assert found == state
    assert len({leaf.name for leaf in leaves}) == len(leaves)
    assert [path_from_json(path_to_json(leaf.path, ARRAYS), ARRAYS) for leaf in leaves] == [
        leaf.path for leaf in leaves
    ]


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([(("dict", "a"),), (("dict", "a"), ("dict", "b"))], "a value and a container"),
        ([(("dict", "a"), ("list", 0)), (("dict", "a"), ("dict", "b"))], "is a"),
        ([(("dict", "a"), ("list", 1))], "lacks some of its positions"),
        ([(("dict", "a"), ("dict", 1)), (("dict", "a"), ("dict", True))], "twice"),
        ([(("list", 0),)], "no dict"),
    ],
    ids=["leaf and container", "two kinds", "hole", "twice", "outermost list"],
)
def test_assemble_of_contradicting_paths_is_an_error(paths: list[object], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        assemble([(path, 0) for path in paths])  # type: ignore[misc]  # hostile


@pytest.mark.parametrize(
    "content",
    [
        [],
        "a",
        [3],
        [{"dict": "a", "list": 0}],
        [{"set": 1}],
        [{"list": -1}],
        [{"list": True}],
        [{"list": "0"}],
        [{"dict": []}],
        ["a"] * 101,
    ],
    ids=repr,
)
def test_path_from_hostile_json_is_an_error(content: object) -> None:
    with pytest.raises(ManifestError, match="path"):
        path_from_json(content, ARRAYS)  # type: ignore[arg-type]  # hostile


def test_replace_values_keeps_containers_and_tensors() -> None:
    tensor = plain(np.zeros(1))
    inner: list[object] = [tensor, 1]
    state: dict[object, object] = {"a": inner, "b": (tensor, 2), "c": {"d": [1]}}

    replace_values(state, {"a/[1]": 7, "b/[1]": 8, "c/d": [9, 9]}, ARRAYS)

    assert state == {"a": [tensor, 7], "b": (tensor, 8), "c": {"d": [9, 9]}}
    assert state["a"] is inner


def test_open_dict_flattens_as_a_dict() -> None:
    assert flatten({"s": OpenDict({"a": 1}, like=None)}, ARRAYS)[0].path == (
        ("dict", "s"),
        ("dict", "a"),
    )
