"""Plain values to JSON and back, equal in value and in type. Nothing is pickled or imported.

A value that JSON has is itself. Any other is an object with one key, a tag that starts with "$":

    $int   hex text (beyond 2**53)    $tuple, $set, $frozenset   a list
    $float nan, inf or -inf           $dict, $ordered_dict       a list of pairs
    $complex  [real, imaginary]       $numpy, $ndarray           data type, (shape,) base64
    $bytes, $bytearray  base64        $numpy_dtype               text
    $str   base64 of UTF-8 with lone surrogates                  $enum  [module, class, member]

and what the framework's adapter adds ($torch_dtype, $torch_size, $torch_device). An enum is only
looked up in modules that are loaded already: reading a checkpoint runs no code.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from hp_checkpoint.errors import ManifestError, StateError

if TYPE_CHECKING:
    from hp_checkpoint.ports import Arrays, Json

MAX_DEPTH = 100
"""How deep containers may be nested."""
MAX_ARRAY_BYTES = 1 << 24
"""The largest numpy array that is kept in the manifest."""
_EXACT_INT = 1 << 53  # any JSON reader takes integers up to here exactly
_ARRAY_KINDS = "biufcSUmM"


def encode(value: object, *, name: str, arrays: Arrays, depth: int = 0) -> Json:
    """Return a value as JSON that `decode` turns back into an equal value of the same type.

    Args:
        value: A plain value.
        name: Its key path, for errors.
        arrays: Knows the framework's own plain values.
        depth: How many containers it lies in.

    Raises:
        StateError: The value, or one inside it, isn't plain.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> encode((1, 2.5, b"hi", {3: None}), name="x", arrays=NoArrays())
        {'$tuple': [1, 2.5, {'$bytes': 'aGk='}, {'$dict': [[3, None]]}]}
    """
    if depth > MAX_DEPTH:
        raise StateError(
            f"{name}: containers are nested more than {MAX_DEPTH} deep, or one holds itself. "
            f"Save flatter values."
        )

    def inner(item: object) -> Json:
        return encode(item, name=name, arrays=arrays, depth=depth + 1)

    known = _ENCODERS.get(type(value))
    if known is not None:
        return known(value, inner)
    if isinstance(value, enum.Enum):
        return _encode_enum(value, name)
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        return _encode_numpy(value, name)
    if isinstance(value, np.dtype) and _is_plain_numpy(value):
        return {"$numpy_dtype": value.str}
    foreign = arrays.encode(value)
    if foreign is not None:
        return {"$" + foreign[0]: foreign[1]}
    raise StateError(
        f"{name}: a value of type {type(value).__module__}.{type(value).__qualname__} can't be "
        f"saved. Save its state as tensors, numbers, text, bytes or containers of these (many "
        f"objects give it by state_dict())."
    )


def decode(content: Json, *, name: str, arrays: Arrays, depth: int = 0) -> object:
    """Return the value that `encode` was given.

    Args:
        content: JSON from a manifest; may be hostile.
        name: Its key path, for errors.
        arrays: Knows the framework's own plain values.
        depth: How many containers it lies in.

    Raises:
        ManifestError: The content isn't one that `encode` writes.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> decode({"$tuple": [1, {"$float": "inf"}]}, name="x", arrays=NoArrays())
        (1, inf)
    """
    if depth > MAX_DEPTH:
        raise ManifestError(f"{name}: the value is nested more than {MAX_DEPTH} deep.")

    def inner(item: Json) -> object:
        return decode(item, name=name, arrays=arrays, depth=depth + 1)

    if isinstance(content, list):
        return [inner(item) for item in content]
    if not isinstance(content, dict):
        return content
    tags = [key for key in content if key.startswith("$")]
    if not tags:
        return {key: inner(item) for key, item in content.items()}
    tag = tags[0]
    try:
        if len(content) != 1:
            raise ValueError("a tagged value has one key")
        decoder = _DECODERS.get(tag)
        if decoder is not None:
            return decoder(content[tag], inner)
        return arrays.decode(tag[1:], content[tag])
    except ManifestError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, AttributeError, MemoryError) as error:
        raise ManifestError(
            f"{name}: the manifest holds a value tagged {tag!r} that can't be read here "
            f"({type(error).__name__}: {error}). Verify the checkpoint; a value of a framework "
            f"needs that framework imported first."
        ) from error


def json_text(content: Json) -> str:
    """Return JSON on one line, ASCII only.

    Example:
        >>> json_text({"a": [1, None]})
        '{"a":[1,null]}'
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


_Inner = Callable[[object], "Json"]
_Outer = Callable[["Json"], object]


def _encode_int(value: int) -> Json:
    return value if abs(value) <= _EXACT_INT else {"$int": hex(value)}


def _encode_float(value: float) -> Json:
    return value if math.isfinite(value) else {"$float": str(value)}


def _encode_text(value: str) -> Json:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"$str": _to_base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _encode_dict(value: dict[object, object], inner: _Inner) -> Json:
    if all(_is_plain_key(key) for key in value):
        return {cast("str", key): inner(item) for key, item in value.items()}
    return {"$dict": [[inner(key), inner(item)] for key, item in value.items()]}


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("$") and _encode_text(key) is key


def _encode_set(value: set[object] | frozenset[object], inner: _Inner) -> Json:
    return sorted((inner(item) for item in value), key=json_text)


def _encode_enum(value: enum.Enum, name: str) -> Json:
    kind = type(value)
    if value.name not in kind.__members__:
        raise StateError(
            f"{name}: {value!r} is no single named member of {kind.__qualname__}. Save its value."
        )
    return {"$enum": [kind.__module__, kind.__qualname__, value.name]}


def _is_plain_numpy(dtype: np.dtype[np.generic]) -> bool:
    return dtype.kind in _ARRAY_KINDS


def _encode_numpy(value: np.generic | np.ndarray, name: str) -> Json:
    if not _is_plain_numpy(value.dtype) or value.nbytes > MAX_ARRAY_BYTES:
        raise StateError(
            f"{name}: a numpy value of {value.nbytes} bytes and data type {value.dtype} can't be "
            f"saved; only plain types up to {MAX_ARRAY_BYTES} bytes go into the manifest. Turn a "
            f"large array into a tensor."
        )
    text = _to_base64(value.tobytes())
    if isinstance(value, np.generic):
        return {"$numpy": [value.dtype.str, text]}
    return {"$ndarray": [value.dtype.str, list(value.shape), text]}


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(content: Json) -> bytes:
    try:
        return base64.b64decode(_text(content), validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _text(content: Json) -> str:
    if not isinstance(content, str):
        raise TypeError(f"expected text, found {type(content).__name__}")
    return content


def _list(content: Json, length: int | None = None) -> list[Json]:
    if not isinstance(content, list) or (length is not None and len(content) != length):
        raise TypeError("expected a list" + (f" of {length}" if length is not None else ""))
    return content


def _pairs(content: Json, inner: _Outer) -> list[tuple[object, object]]:
    pairs = [_list(pair, 2) for pair in _list(content)]
    found = [(inner(key), inner(item)) for key, item in pairs]
    if len({key for key, _ in found}) != len(found):
        raise ValueError("a key comes twice")
    return found


def _decode_float(content: Json) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(f"expected nan, inf or -inf, found {content!r}")
    return float(_text(content))


def _decode_complex(content: Json, inner: _Outer) -> complex:
    real, imaginary = (inner(part) for part in _list(content, 2))
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("expected two floats")
    return complex(real, imaginary)


def _decode_int(content: Json) -> int:
    return int(_text(content), 16)


def _decode_enum(content: Json) -> enum.Enum:
    module, qualname, member = (_text(part) for part in _list(content, 3))
    if module not in sys.modules:
        raise ValueError(f"enum {qualname} is in module {module!r}, which isn't imported")
    found: object = sys.modules[module]
    for part in qualname.split("."):
        found = vars(found)[part]
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise TypeError(f"{module}.{qualname} is no enum")
    return found.__members__[member]


def _numpy_dtype(content: Json) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(_text(content))
    if not _is_plain_numpy(dtype):
        raise ValueError(f"data type {dtype} isn't plain")
    return dtype


def _decode_numpy(content: Json) -> object:
    name, data = _list(content, 2)
    dtype = _numpy_dtype(name)
    if not dtype.itemsize:  # an empty text
        return np.zeros(1, dtype)[0]
    return np.frombuffer(_from_base64(data), dtype=dtype, count=1)[0]


def _decode_array(content: Json) -> object:
    dtype, shape, data = _list(content, 3)
    lengths = _list(shape)
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise TypeError("expected a shape")
    values = np.frombuffer(_from_base64(data), dtype=_numpy_dtype(dtype))
    return values.reshape(cast("list[int]", lengths)).copy()


_ENCODERS: dict[type, Callable[..., Json]] = {
    type(None): lambda value, inner: None,
    bool: lambda value, inner: cast("Json", value),
    int: lambda value, inner: _encode_int(value),
    float: lambda value, inner: _encode_float(value),
    str: lambda value, inner: _encode_text(value),
    complex: lambda value, inner: {"$complex": [inner(value.real), inner(value.imag)]},
    bytes: lambda value, inner: {"$bytes": _to_base64(value)},
    bytearray: lambda value, inner: {"$bytearray": _to_base64(value)},
    list: lambda value, inner: [inner(item) for item in value],
    tuple: lambda value, inner: {"$tuple": [inner(item) for item in value]},
    dict: _encode_dict,
    OrderedDict: lambda value, inner: {
        "$ordered_dict": [[inner(key), inner(item)] for key, item in value.items()]
    },
    set: lambda value, inner: {"$set": _encode_set(value, inner)},
    frozenset: lambda value, inner: {"$frozenset": _encode_set(value, inner)},
}

_DECODERS: dict[str, Callable[..., object]] = {
    "$int": lambda content, inner: _decode_int(content),
    "$float": lambda content, inner: _decode_float(content),
    "$str": lambda content, inner: _from_base64(content).decode("utf-8", "surrogatepass"),
    "$complex": _decode_complex,
    "$bytes": lambda content, inner: _from_base64(content),
    "$bytearray": lambda content, inner: bytearray(_from_base64(content)),
    "$tuple": lambda content, inner: tuple(inner(item) for item in _list(content)),
    "$set": lambda content, inner: {inner(item) for item in _list(content)},
    "$frozenset": lambda content, inner: frozenset(inner(item) for item in _list(content)),
    "$dict": lambda content, inner: dict(_pairs(content, inner)),
    "$ordered_dict": lambda content, inner: OrderedDict(_pairs(content, inner)),
    "$numpy": lambda content, inner: _decode_numpy(content),
    "$ndarray": lambda content, inner: _decode_array(content),
    "$numpy_dtype": lambda content, inner: _numpy_dtype(content),
    "$enum": lambda content, inner: _decode_enum(content),
}
