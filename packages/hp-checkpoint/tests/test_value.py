"""Plain values come back equal in value and type, or are refused by name."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_checkpoint.errors import ManifestError, StateError
from hp_checkpoint.ports import NoArrays
from hp_checkpoint.value import decode, encode, json_text


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


def round_trip(value: object) -> object:
    text = json_text(encode(value, name="v", arrays=NoArrays()))
    return decode(json.loads(text), name="v", arrays=NoArrays())


VALUES = [
    None,
    True,
    0,
    -7,
    2**53,
    2**53 + 1,
    -(2**200),
    0.0,
    -0.0,
    1.0,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    "",
    "text",
    "$bytes",
    "\u00e4\U0001f600",
    "\ud800",
    b"",
    bytes(range(256)),
    bytearray(b"ab"),
    1j,
    complex(-0.0, math.inf),
    (),
    (1, (2, [3])),
    [],
    [None, 1.5],
    {},
    {"a": {"b": ()}},
    {"$a": 1},
    {2: "a", "2": "b", None: 2, (1, 2): 3},
    OrderedDict([("b", 1), ("a", 2)]),
    {1, 2},
    frozenset({"a"}),
    Color.RED,
    Level.LOW,
    np.dtype("float16"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_of_a_plain_type_comes_back_equal_with_its_type(value: object) -> None:
    found = round_trip(value)

    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_value_nan_comes_back_as_nan() -> None:
    found = round_trip(math.nan)

    assert isinstance(found, float)
    assert math.isnan(found)


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", ">f8", "c8", "U3", "S2", "M8[s]"])
def test_value_numpy_scalar_comes_back_with_its_type(dtype: str) -> None:
    value = np.zeros(1, dtype)[0]

    found = round_trip(value)

    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_value_numpy_array_comes_back_with_type_and_shape(shape: tuple[int, ...]) -> None:
    value = np.arange(math.prod(shape), dtype=">i2").reshape(shape)

    found = round_trip(value)

    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)


def test_value_python_random_state_restores_the_sequence() -> None:
    generator = random.Random(7)
    state = round_trip(generator.getstate())
    expected = generator.random()

    generator.setstate(state)  # type: ignore[arg-type]  # what getstate gave

    assert generator.random() == expected


def test_value_numpy_random_state_restores_the_sequence() -> None:
    generator = np.random.default_rng(7)
    state = round_trip(generator.bit_generator.state)
    expected = generator.random()

    generator.bit_generator.state = state

    assert generator.random() == expected


Pair = namedtuple("Pair", "a b")
REFUSED = [
    object(),
    Pair(1, 2),
    defaultdict(int),
    lambda: None,
    range(3),
    {"a": [object()]},
    np.zeros(1, object),
    np.zeros(1, "i4,f4"),
    np.zeros((1 << 24) + 1, "u1"),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_value_of_another_type_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(StateError, match=r"^run/config: .*can't be saved"):
        encode(value, name="run/config", arrays=NoArrays())


def test_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)

    with pytest.raises(StateError, match="nested more than 100 deep"):
        encode(value, name="v", arrays=NoArrays())


HOSTILE = [
    {"$tuple": 3},
    {"$unknown": 1},
    {"$tuple": [], "other": 1},
    {"$float": "1e3"},
    {"$int": "zz"},
    {"$bytes": "***"},
    {"$bytes": 3},
    {"$complex": [1.0]},
    {"$complex": ["a", "b"]},
    {"$dict": [[1]]},
    {"$dict": [[[], 1]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$set": [[]]},
    {"$enum": ["os", "system", "x"]},
    {"$enum": ["no.such.module", "E", "A"]},
    {"$enum": ["enum", "Enum", "__init__"]},
    {"$ndarray": ["O", [1], "AAAAAAAAAAA="]},
    {"$ndarray": ["<f4", [1 << 60], "AAAA"]},
    {"$ndarray": ["<f4", [-1], "AAAAAA=="]},
    {"$ndarray": ["<f4", [2], "AAAAAA=="]},
    {"$numpy": ["<f4", ""]},
    {"$numpy_dtype": "O"},
    {"$numpy_dtype": "nonsense"},
]


@pytest.mark.parametrize("content", HOSTILE, ids=repr)
def test_decode_of_hostile_content_is_a_named_error(content: object) -> None:
    with pytest.raises(ManifestError, match=r"^v: "):
        decode(content, name="v", arrays=NoArrays())  # type: ignore[arg-type]  # hostile


def test_decode_of_deep_content_is_a_named_error() -> None:
    content: list[object] = []
    for _ in range(200):
        content = [content]

    with pytest.raises(ManifestError, match="nested more than 100 deep"):
        decode(content, name="v", arrays=NoArrays())  # type: ignore[arg-type]  # hostile


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None, categories=None))
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None)  # other work on the machine is no fault
@given(plain_values)
def test_value_of_any_nesting_comes_back_equal(value: object) -> None:
    found = round_trip(value)

    assert repr(found) == repr(value)
