"""What a load will do: a state dict and a manifest in, a plan or one error out. Changes nothing.

    in the state dict      in the checkpoint          then
    tensor                 tensor of type and shape   copy
    value                  value                      replace
    empty dict             values below it            fill
    `OpenDict`             anything below it          add what it lacks
    anything               only other ranks' values   keep, and report as per_rank
    anything               nothing                    missing
    anything               something else             an error that lists all of these
    nothing                anything                   unexpected

Values of one rank are given back to that rank if as many ranks load as saved, and to none else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hp_checkpoint.errors import MatchError, StateError
from hp_checkpoint.manifest import TensorEntry, ValueEntry
from hp_checkpoint.tree import OpenDict, assemble, flatten, name_of, open_dicts
from hp_checkpoint.value import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hp_checkpoint.manifest import Manifest
    from hp_checkpoint.ports import Arrays, Peers, TensorInfo
    from hp_checkpoint.tree import Leaf, Path

_MAX_LINES = 50


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did not do, by name."""

    missing: tuple[str, ...]
    """Asked for, but not in the checkpoint: kept as they were (with `strict=False` only)."""
    unexpected: tuple[str, ...]
    """In the checkpoint, but not asked for."""
    per_rank: tuple[str, ...]
    """Saved by another number of ranks, each with its own value: kept as they were."""


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor to fill."""

    tensor: object
    """The framework's object."""
    info: TensorInfo
    """What it is."""
    entry: TensorEntry
    """What it gets."""


@dataclass(frozen=True, slots=True)
class Addition:
    """What a dict gets that it lacks."""

    target: OpenDict
    """The dict."""
    values: list[tuple[Path, object]]
    """Plain values with their paths below the dict."""
    tensors: list[tuple[Path, TensorEntry]]
    """Tensors to be made, with their paths below the dict."""


@dataclass(slots=True)
class LoadPlan:
    """What a load will do on this rank."""

    copies: list[TensorCopy] = field(default_factory=list)
    """Tensors to fill."""
    values: dict[str, object] = field(default_factory=dict)
    """New values by name."""
    additions: list[Addition] = field(default_factory=list)
    """What dicts get that they lack."""
    missing: list[str] = field(default_factory=list)
    """As in `LoadReport`."""
    per_rank: list[str] = field(default_factory=list)
    """As in `LoadReport`."""
    unexpected: list[str] = field(default_factory=list)
    """As in `LoadReport`."""


_Entry = TensorEntry | ValueEntry


def match(
    state: Mapping[object, object],
    manifest: Manifest,
    *,
    peers: Peers,
    arrays: Arrays,
    strict: bool,
) -> LoadPlan:
    """Return what loading a checkpoint into a state dict will do.

    Args:
        state: What is loaded into.
        manifest: The checkpoint.
        peers: Which rank this is, of how many.
        arrays: Opens tensors.
        strict: Whether missing names are an error.

    Raises:
        MatchError: Names are missing, or are of another kind, data type or shape; lists all.
    """
    matcher = _Matcher(manifest, peers, arrays)
    matcher.run(state)
    misfits = matcher.misfits
    if strict:
        misfits += [f"{name}: wanted, found nothing" for name in matcher.plan.missing]
    if misfits:
        more = len(misfits) - _MAX_LINES
        lines = [*misfits[:_MAX_LINES], *([f"and {more} more"] if more > 0 else [])]
        hint = "\nPass strict=False to keep what is missing." if matcher.plan.missing else ""
        raise MatchError(
            "the state dict and the checkpoint don't fit; nothing was changed:\n  "
            + "\n  ".join(lines)
            + hint
        )
    return matcher.plan


class _Matcher:
    def __init__(self, manifest: Manifest, peers: Peers, arrays: Arrays) -> None:
        self._arrays = arrays
        self._index = peers.index
        self._same_size = len(peers.ranks) == manifest.world_size
        self._entries: dict[str, dict[int | None, _Entry]] = {}
        for leaf in manifest.leaves:
            self._entries.setdefault(leaf.name, {})[leaf.rank] = leaf
        self._parents = {name for leaf in manifest.leaves for name, _ in _parents(leaf.path)}
        self.plan = LoadPlan()
        self.misfits: list[str] = []
        self._used: set[str] = set()

    def run(self, state: Mapping[object, object]) -> None:
        leaves = flatten(state, self._arrays)
        opened = {name_of(path): found for path, found in open_dicts(state)}
        empty = {leaf.name for leaf in leaves if isinstance(leaf.value, dict) and not leaf.value}
        below = self._below(empty | set(opened))
        for leaf in leaves:
            if leaf.name in opened:
                continue  # empty: completed below
            if leaf.name in self._entries:
                self._fit(leaf)
            elif leaf.name in empty and below[leaf.name]:
                self._fill(leaf, below[leaf.name])
            elif leaf.name in self._parents:
                self._misfit(leaf.name, _kind_of(leaf), "a container with tensors in it")
            else:
                self.plan.missing.append(leaf.name)
        for name, found in opened.items():
            self._used.add(name)
            self._complete(found, below[name])
        self.plan.unexpected += [name for name in self._entries if name not in self._used]

    def _below(self, names: set[str]) -> dict[str, list[tuple[Path, str]]]:
        """Return, per name, what the checkpoint holds below it: rest of the path, and name."""
        found: dict[str, list[tuple[Path, str]]] = {name: [] for name in names}
        for name, entries in self._entries.items():
            path = next(iter(entries.values())).path
            for parent, rest in _parents(path):
                if parent in found:
                    found[parent].append((rest, name))
        return found

    def _pick(self, name: str) -> _Entry | None:
        """Return this rank's entry, and note a name that only other ranks have one of."""
        self._used.add(name)
        entries = self._entries[name]
        if None in entries:
            return entries[None]
        if self._same_size and self._index in entries:
            return entries[self._index]
        (self.plan.missing if self._same_size else self.plan.per_rank).append(name)
        return None

    def _fit(self, leaf: Leaf) -> None:
        entry = self._pick(leaf.name)
        if entry is None:
            return
        if isinstance(entry, ValueEntry):
            if leaf.is_tensor:
                self._misfit(leaf.name, _kind_of(leaf), "a plain value")
            else:
                self.plan.values[leaf.name] = self._decode(entry)
            return
        found = f"a {entry.dtype} tensor of shape {entry.shape}"
        if not leaf.is_tensor:
            self._misfit(leaf.name, _kind_of(leaf), found)
            return
        try:
            info = self._arrays.describe(leaf.value)
        except StateError as error:
            self.misfits.append(f"{leaf.name}: can't be loaded into: {error}")
            return
        if (info.dtype, info.shape) != (entry.dtype, entry.shape):
            self._misfit(leaf.name, f"a {info.dtype} tensor of shape {info.shape}", found)
            return
        self.plan.copies.append(TensorCopy(leaf.value, info, entry))

    def _fill(self, leaf: Leaf, below: Sequence[tuple[Path, str]]) -> None:
        """Give an empty dict what was saved below it, if that is values only."""
        entries = [entry for _, name in below for entry in self._entries[name].values()]
        if any(isinstance(entry, TensorEntry) for entry in entries):
            return
        picked = [(rest, self._pick(name)) for rest, name in below]
        self.plan.values[leaf.name] = assemble(
            [(rest, self._decode(one)) for rest, one in picked if isinstance(one, ValueEntry)]
        )

    def _complete(self, target: OpenDict, below: Sequence[tuple[Path, str]]) -> None:
        """Plan what an open dict lacks."""
        addition = Addition(target, [], [])
        for rest, name in below:
            if rest[0][1] in target:
                continue
            entry = self._pick(name)
            if isinstance(entry, ValueEntry):
                addition.values.append((rest, self._decode(entry)))
            elif entry is not None:
                addition.tensors.append((rest, entry))
        self.plan.additions.append(addition)

    def _decode(self, entry: ValueEntry) -> object:
        return decode(entry.content, name=entry.name, arrays=self._arrays)

    def _misfit(self, name: str, wanted: str, found: str) -> None:
        self.misfits.append(f"{name}: wanted {wanted}, found {found}")


def _parents(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of every container around a leaf, with the rest of the path."""
    for length in range(1, len(path)):
        yield name_of(path[:length]), path[length:]


def _kind_of(leaf: Leaf) -> str:
    return "a tensor" if leaf.is_tensor else f"a plain value ({type(leaf.value).__name__})"
