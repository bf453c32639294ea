"""How a state dict becomes a list of named leaves, and how leaves become one again.

    a leaf is                              its path goes through
    a tensor                               every container around it
    a plain value                          dicts around it, and lists or tuples that hold tensors
    a list or tuple without any tensor     (one value, replaced as a whole)
    an empty container                     (one value)

So `optimizer.state_dict()` gives one leaf per state tensor and one, `param_groups`, for all groups.
A name is a path written down: text keys as they are, other keys and positions in brackets, joined
by "/". Two different paths of one state dict never have one name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from hp_checkpoint.errors import ManifestError, StateError
from hp_checkpoint.value import MAX_DEPTH, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hp_checkpoint.ports import Arrays, Json

Kind: TypeAlias = Literal["dict", "ordered", "list", "tuple"]
Step: TypeAlias = tuple[Kind, object]
Path: TypeAlias = tuple[Step, ...]

_KINDS: dict[type, Kind] = {dict: "dict", OrderedDict: "ordered", list: "list", tuple: "tuple"}
_ESCAPES = (("~", "~0"), ("/", "~1"), ("[", "~2"))
_KEY_TYPES = (str, int, bool, float, bytes, type(None), tuple)


class OpenDict(dict[object, object]):
    """A dict that `load` completes: what the checkpoint holds for it and it lacks is added.

    Args:
        like: A tensor; added tensors of its shape are laid out like it, others are whole.

    It is saved as an ordinary dict. `optimizer_state` uses it for the state of a parameter, which
    an optimizer makes at its first step only.

    Example:
        >>> OpenDict(like=None) == {}
        True
    """

    def __init__(self, values: Mapping[object, object] | None = None, *, like: object) -> None:
        super().__init__(values or {})
        self.like = like


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or a plain value with its place."""

    path: Path
    """The containers from the outside in, each with the key or position used."""
    value: object
    """The tensor or value itself."""
    is_tensor: bool
    """Whether `value` is a tensor."""

    @property
    def name(self) -> str:
        """The path written down."""
        return name_of(self.path)


def name_of(path: Path) -> str:
    """Return a path as text.

    Example:
        >>> name_of((("dict", "model"), ("dict", "0.weight")))
        'model/0.weight'
        >>> name_of((("dict", "state"), ("dict", 0), ("dict", "a/b")))
        'state/[0]/a~1b'
    """
    return "/".join(_key_text(key) for _, key in path)


def flatten(state: Mapping[object, object], arrays: Arrays) -> list[Leaf]:
    """Return the leaves of a state dict, in order.

    Args:
        state: Nested dicts, lists and tuples with tensors and plain values.
        arrays: Tells what a tensor is.

    Raises:
        StateError: It isn't a dict, a key is of another type than text, numbers, None, bytes or
            tuples, containers are nested too deep, or two paths have one name.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> [leaf.name for leaf in flatten({"a": {"b": 1, 2: []}, "c": [3, 4]}, NoArrays())]
        ['a/b', 'a/[2]', 'c']
    """
    if kind_of(state) not in ("dict", "ordered"):
        raise StateError(
            f"a state dict is a dict, found {type(state).__name__}. Wrap the value: "
            f"{{'value': ...}}."
        )
    leaves = list(_walk(state, (), arrays))
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.name in seen:
            raise StateError(f"two keys of the state dict are both called {leaf.name!r}.")
        seen.add(leaf.name)
    return leaves


def open_dicts(state: object, path: Path = ()) -> Iterator[tuple[Path, OpenDict]]:
    """Yield every `OpenDict` of a state dict with its path.

    Example:
        >>> [name_of(path) for path, _ in open_dicts({"a": OpenDict(like=None), "b": 1})]
        ['a']
    """
    kind = kind_of(state)
    if isinstance(state, OpenDict):
        yield path, state
    elif kind is not None:
        for key, item in _items(state, kind):
            yield from open_dicts(item, (*path, (kind, key)))


def assemble(leaves: Sequence[tuple[Path, object]]) -> dict[object, object]:
    """Return the nested containers that paths and values describe.

    Args:
        leaves: Paths below one outermost dict, each with its value.

    Raises:
        ManifestError: The paths contradict each other.

    Example:
        >>> assemble([((("dict", "a"), ("list", 0)), 1), ((("dict", "a"), ("list", 1)), 2)])
        {'a': [1, 2]}
    """
    if not leaves:
        return {}
    grown = _grow(list(leaves), 0)
    if not isinstance(grown, dict):
        raise ManifestError("the outermost container of the manifest's paths is no dict.")
    return grown


def replace_values(
    state: object, values: Mapping[str, object], arrays: Arrays, path: Path = ()
) -> object:
    """Put new plain values into a state dict, in place; return it (a new object for a tuple).

    Args:
        state: What `flatten` was given.
        values: New values by name; leaves without one stay.
        arrays: Tells what a tensor is.
        path: Where `state` lies.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> replace_values({"a": {"b": 1}}, {"a/b": 7}, NoArrays())
        {'a': {'b': 7}}
    """
    kind = kind_of(state)
    if kind is None or not _is_open(state, kind, arrays):
        return state if not path else values.get(name_of(path), state)
    items = [
        (key, replace_values(item, values, arrays, (*path, (kind, key))))
        for key, item in _items(state, kind)
    ]
    if kind == "tuple":
        return tuple(item for _, item in items)
    if isinstance(state, list):
        state[:] = [item for _, item in items]
    else:
        assert isinstance(state, dict)
        state.update(items)
    return state


def path_to_json(path: Path, arrays: Arrays) -> Json:
    """Return a path as JSON: text keys of dicts as they are, else {kind: key}.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> path_to_json((("dict", "a"), ("ordered", "b"), ("list", 0)), NoArrays())
        ['a', {'ordered': 'b'}, {'list': 0}]
    """
    steps: list[Json] = []
    for kind, key in path:
        plain = kind == "dict" and isinstance(key, str)
        content = encode(key, name=name_of(path), arrays=arrays)
        steps.append(content if plain and isinstance(content, str) else {kind: content})
    return steps


def path_from_json(content: Json, arrays: Arrays) -> Path:
    """Return the path that `path_to_json` was given.

    Raises:
        ManifestError: The content isn't one that `path_to_json` writes.

    Example:
        >>> from hp_checkpoint.ports import NoArrays
        >>> path_from_json(["a", {"list": 0}], NoArrays())
        (('dict', 'a'), ('list', 0))
    """
    if not isinstance(content, list) or not 0 < len(content) <= MAX_DEPTH:
        raise ManifestError(f"a path of the manifest is no list of 1 to {MAX_DEPTH} steps.")
    return tuple(_step_from_json(step, arrays) for step in content)


def _step_from_json(step: Json, arrays: Arrays) -> Step:
    if isinstance(step, str):
        return ("dict", step)
    kinds: list[Kind] = ["dict", "ordered", "list", "tuple"]
    for kind in kinds:
        if isinstance(step, dict) and list(step) == [kind]:
            key = decode(step[kind], name="a path", arrays=arrays)
            positional = kind in ("list", "tuple")
            if _is_key(key) and (not positional or (type(key) is int and 0 <= key < 1 << 31)):
                return (kind, key)
    raise ManifestError(f"a path of the manifest has the step {step!r}, which isn't one.")


def kind_of(value: object) -> Kind | None:
    """Return which container a value is, None for anything else.

    Example:
        >>> kind_of([]), kind_of("text")
        ('list', None)
    """
    if isinstance(value, OpenDict):
        return "dict"
    return _KINDS.get(type(value))


def _walk(value: object, path: Path, arrays: Arrays) -> Iterator[Leaf]:
    if arrays.is_tensor(value):
        yield Leaf(path, value, is_tensor=True)
        return
    if len(path) > MAX_DEPTH:
        raise StateError(
            f"{name_of(path[:4])}/...: containers are nested more than {MAX_DEPTH} deep, or one "
            f"holds itself. Save a flatter state dict."
        )
    kind = kind_of(value)
    if kind is None or not _is_open(value, kind, arrays):
        if path:
            plain = {} if isinstance(value, OpenDict) else value
            yield Leaf(path, plain, is_tensor=False)
        return
    for key, item in _items(value, kind):
        _check_key(key, path)
        yield from _walk(item, (*path, (kind, key)), arrays)


def _is_open(value: object, kind: Kind, arrays: Arrays) -> bool:
    """Tell whether a container's items are leaves of their own."""
    if kind in ("dict", "ordered"):
        return bool(value)
    return _holds_tensor(value, arrays, 0)


def _holds_tensor(value: object, arrays: Arrays, depth: int) -> bool:
    if arrays.is_tensor(value):
        return True
    kind = kind_of(value)
    if kind is None or depth > MAX_DEPTH:
        return False
    return any(_holds_tensor(item, arrays, depth + 1) for _, item in _items(value, kind))


def _items(value: object, kind: Kind) -> list[tuple[object, object]]:
    if kind in ("dict", "ordered"):
        assert isinstance(value, dict)
        return list(value.items())
    assert isinstance(value, (list, tuple))
    return list(enumerate(value))


def _check_key(key: object, path: Path) -> None:
    if not _is_key(key):
        raise StateError(
            f"{name_of(path) or 'the state dict'}: a key of type {type(key).__name__} can't be "
            f"saved: {key!r}. Use text, numbers, None, bytes or tuples of these."
        )


def _is_key(key: object) -> bool:
    if type(key) is str:
        return key.isascii() or key == key.encode("utf-8", "replace").decode("utf-8")
    if type(key) is tuple:
        return all(_is_key(item) for item in key)
    return type(key) in _KEY_TYPES


def _key_text(key: object) -> str:
    return _escaped(key) if isinstance(key, str) else f"[{key!r}]"


@lru_cache(maxsize=1 << 16)
def _escaped(key: str) -> str:
    for raw, code in _ESCAPES:
        key = key.replace(raw, code)
    return "~3metadata__" if key == "__metadata__" else key


def _grow(leaves: list[tuple[Path, object]], depth: int) -> object:
    """Build what lies below one container: all paths agree up to `depth`."""
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    groups: dict[object, list[tuple[Path, object]]] = {}
    kinds: set[Kind] = set()
    for path, value in leaves:
        if len(path) == depth:
            raise ManifestError(f"{name_of(path)!r} is a value and a container at once.")
        kind, key = path[depth]
        kinds.add(kind)
        groups.setdefault(_identity(key), []).append((path, value))
    if len(kinds) != 1:
        raise ManifestError(f"{name_of(leaves[0][0][:depth])!r} is a {' and a '.join(kinds)}.")
    items = {group[0][0][depth][1]: _grow(group, depth + 1) for group in groups.values()}
    if len(items) != len(groups):
        raise ManifestError(f"{name_of(leaves[0][0][:depth])!r} has a key twice.")
    build = _BUILDERS[kinds.pop()]
    return build(items, name_of(leaves[0][0][:depth]))


def _identity(key: object) -> tuple[type, object]:
    return (type(key), key)


def _sequence(items: dict[object, object], name: str) -> list[object]:
    if set(items) != set(range(len(items))):
        raise ManifestError(f"{name!r} lacks some of its positions.")
    return [items[position] for position in range(len(items))]


_BUILDERS: dict[Kind, Callable[[dict[object, object], str], object]] = {
    "dict": lambda items, name: items,
    "ordered": lambda items, name: OrderedDict(items),
    "list": _sequence,
    "tuple": lambda items, name: tuple(_sequence(items, name)),
}
