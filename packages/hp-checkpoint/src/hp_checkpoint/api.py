"""The public functions: find the framework, then hand over to the core."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from hp_checkpoint.inspection import read_metadata
from hp_checkpoint.loading import load_all, load_state
from hp_checkpoint.manifest import TensorEntry
from hp_checkpoint.ports import Alone, NoArrays
from hp_checkpoint.saving import save_state
from hp_checkpoint.value import MAX_DEPTH
from hp_mesh._framework import current_framework, framework_of, load_adapter

if TYPE_CHECKING:
    import os

    from hp_checkpoint.match import LoadReport
    from hp_checkpoint.ports import Arrays, Peers
    from hp_mesh._framework import Framework

_FRAMEWORKS: tuple[Framework, ...] = ("torch", "mindspore")


def save(
    state_dict: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    group: object | None = None,
    overwrite: bool = True,
) -> None:
    """Save a state dict as one checkpoint, all of it or nothing; collective over the group.

    Every rank writes what it holds; what several ranks hold is written once. Until the very end
    the path holds what it held before: a save that is killed or fails changes nothing. Plain
    values come back equal and of the same type; those that differ between ranks are kept for each.

    Args:
        state_dict: Nested dicts, lists and tuples of tensors, DTensors and plain values.
        path: The checkpoint's folder, on a file system that all ranks share.
        group: The ranks that save together: a 1-D mesh, (mesh, axis), a process group, a
            communicator, or None for all ranks (without a process group: this process alone).
        overwrite: Whether a checkpoint at `path` may be replaced.

    Raises:
        StateError: Something can't be saved; names the key. Nothing was written.
        ExistsError: `overwrite=False` and there is a checkpoint. Nothing was written.
        LockedError: Another job is saving to this path.
        FolderError: The ranks don't see the same folder.
        RankError: A rank failed, for example because the disk is full.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save({"step": 3, "betas": (0.9, 0.95)}, folder)
        >>> load_full(folder)
        {'step': 3, 'betas': (0.9, 0.95)}
    """
    state = cast("Mapping[object, object]", state_dict)
    arrays, peers = _ports(state, group)
    save_state(state, path, peers=peers, arrays=arrays, overwrite=overwrite)


def load(
    state_dict: Mapping[str, object],
    path: str | os.PathLike[str],
    *,
    group: object | None = None,
    strict: bool = True,
    verify: bool = True,
) -> LoadReport:
    """Load a checkpoint into a state dict, in place; collective over the group.

    The number of ranks, meshes and placements may differ from those at the save: each rank reads
    the byte ranges of its own boxes. Tensors keep their identity and get new values; plain values
    are replaced in their dicts. All ranks check everything they will read before any tensor
    changes.

    Args:
        state_dict: Nested dicts, lists and tuples; says what is asked for.
        path: The checkpoint's folder.
        group: The ranks that load together, as for `save`.
        strict: Whether names that the checkpoint lacks are an error.
        verify: Whether to compare checksums first; without, damaged bytes are loaded unnoticed.

    Returns:
        Names that were missing (with `strict=False`), that were not asked for, and whose values
        belong to the ranks of a group of another size.

    Raises:
        MatchError: Names are missing, or have another kind, data type or shape; lists all.
        DamageError: Files are missing, cut or changed.
        ManifestError: The manifest is damaged or not acceptable.
        NotFoundError: There is no checkpoint.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save({"step": 3, "loss": 0.5}, folder)
        >>> state = {"step": 0}
        >>> load(state, folder).unexpected
        ('loss',)
        >>> state
        {'step': 3}
    """
    state = cast("Mapping[object, object]", state_dict)
    arrays, peers = _ports(state, group)
    return load_state(state, path, peers=peers, arrays=arrays, strict=strict, verify=verify)


def load_full(path: str | os.PathLike[str], *, verify: bool = True) -> dict[str, object]:
    """Return everything in a checkpoint, with whole tensors on the host; not collective.

    Args:
        path: The checkpoint's folder.
        verify: Whether to compare checksums first.

    Returns:
        The state dict. Values that differed between ranks are `PerRank`.

    Raises:
        DamageError: Files are missing, cut or changed.
        ManifestError: The manifest is damaged or not acceptable.
        NotFoundError: There is no checkpoint.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> save({"ids": [1, 2]}, folder)
        >>> load_full(folder)
        {'ids': [1, 2]}
    """
    arrays = _arrays_to_load(path)
    return cast("dict[str, object]", load_all(path, arrays=arrays, verify=verify))


def _ports(state: object, group: object | None) -> tuple[Arrays, Peers]:
    framework = _framework_in(state, 0)
    if framework is None and group is not None:
        framework = framework_of(group)
    if framework is None and any(name in sys.modules for name in _FRAMEWORKS):
        framework = current_framework()  # only plain values, but other ranks may wait
    adapter = None if framework is None else load_adapter("hp_checkpoint", framework)
    arrays: Arrays = NoArrays() if adapter is None else adapter.arrays()
    if hasattr(group, "all_gather_bytes"):
        return arrays, cast("Peers", group)
    if adapter is None:
        return arrays, Alone()
    return arrays, cast("Peers", adapter.peers(group))


def _framework_in(value: object, depth: int) -> Framework | None:
    """Return the framework of the first tensor or other object of one."""
    found = framework_of(value)
    if found is not None or depth > MAX_DEPTH:
        return found
    if isinstance(value, Mapping):
        inner: Iterator[object] = iter(value.values())
    elif isinstance(value, (list, tuple)):
        inner = iter(value)
    else:
        return None
    return next((f for f in (_framework_in(item, depth + 1) for item in inner) if f), None)


def _arrays_to_load(path: str | os.PathLike[str]) -> Arrays:
    loaded = any(name in sys.modules for name in _FRAMEWORKS)
    leaves = read_metadata(path).leaves
    if not loaded and not any(isinstance(leaf, TensorEntry) for leaf in leaves):
        return NoArrays()
    arrays: Arrays = load_adapter("hp_checkpoint", current_framework()).arrays()
    return arrays
