"""Loading, step by step; nothing is changed before the last step, which all ranks reach together.

    step       each rank
    plan       reads the manifest, compares it with its state dict, opens the files it needs
    verify     reads every block it will need and compares checksums
    copy       reads again, now straight into the tensors

`verify=False` leaves the second step out; sizes of files are compared all the same.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hp_checkpoint.agreement import Agreement
from hp_checkpoint.check import check
from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.errors import DamageError, FolderError
from hp_checkpoint.folder import read_manifest, resolve
from hp_checkpoint.manifest import BLOCK_BYTES, Manifest, ValueEntry, from_bytes
from hp_checkpoint.match import LoadPlan, LoadReport, TensorCopy, match
from hp_checkpoint.ranges import Limits, Slab, index_of, slabs, strides_of
from hp_checkpoint.reader import READ_BYTES, Damage, DataReader
from hp_checkpoint.tree import assemble, replace_values
from hp_checkpoint.value import decode
from hp_checkpoint.writer import as_bytes
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from hp_checkpoint.manifest import Piece
    from hp_checkpoint.ports import Arrays, Peers
    from hp_checkpoint.tree import OpenDict
    from hp_checkpoint.tree import Path as KeyPath

_MAX_LINES = 20
_ATTEMPTS = 5
_COPY_LIMITS = Limits(slab_bytes=READ_BYTES, gap_bytes=BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class PerRank:
    """What `load_full` gives where the ranks' values differed.

    Example:
        >>> PerRank({0: "a", 1: "b"}).values[1]
        'b'
    """

    values: dict[int, object]
    """Each rank's value, by group index."""


@dataclass(frozen=True, slots=True)
class _Need:
    """A part of a piece that a tensor needs."""

    copy: TensorCopy
    piece: Piece
    overlap: Box

    def slabs(self, limits: Limits) -> Iterator[Slab]:
        region = self.overlap.relative_to(self.piece.box)
        itemsize = DTYPES[self.copy.info.dtype].itemsize
        return slabs(self.piece.box.sizes, region, itemsize, limits)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint that is ready to be read."""

    plan: LoadPlan
    needs: list[_Need]
    reader: DataReader
    damages: list[Damage]
    additions: list[tuple[OpenDict, dict[object, object]]]


def load_state(
    state: Mapping[object, object],
    path: str | os.PathLike[str],
    *,
    peers: Peers,
    arrays: Arrays,
    strict: bool,
    verify: bool,
) -> LoadReport:
    """Load into a state dict; see `hp_checkpoint.load`.

    Args:
        state: Nested dicts, lists and tuples of tensors and plain values.
        path: The checkpoint's folder.
        peers: The ranks that load together.
        arrays: Opens tensors.
        strict: Whether missing names are an error.
        verify: Whether to check checksums first.

    Raises:
        CheckpointError: One of the family, the same on all ranks; nothing was changed.

    Example:
        >>> import tempfile
        >>> from hp_checkpoint.ports import Alone, NoArrays
        >>> from hp_checkpoint.saving import save_state
        >>> folder, state = tempfile.mkdtemp(), {"step": 0}
        >>> save_state({"step": 3}, folder, peers=Alone(), arrays=NoArrays(), overwrite=True)
        >>> ports = {"peers": Alone(), "arrays": NoArrays()}
        >>> report = load_state(state, folder, strict=True, verify=True, **ports)
        >>> state
        {'step': 3}
    """
    with ExitStack() as stack:
        opened = _open(state, path, peers=peers, arrays=arrays, strict=strict, stack=stack)
        with Agreement(peers, "verify the checkpoint"):
            damages = opened.damages
            if verify and not damages:
                damages = _verify(opened.needs, opened.reader)
            if damages:
                raise damage_error(damages, path)
        with Agreement(peers, "copy: a disk failed after verifying, tensors may be half loaded"):
            _copy_all(opened.needs, opened.reader, arrays)
    plan = opened.plan
    for target, added in opened.additions:
        target.update(added)
    replace_values(state, plan.values, arrays)
    return LoadReport(tuple(plan.missing), tuple(plan.unexpected), tuple(plan.per_rank))


def read_checked(folder: Path) -> tuple[Manifest, bytes]:
    """Return the manifest in a folder, checked, and its bytes.

    Raises:
        NotFoundError: There is none.
        ManifestError: It is damaged or inconsistent.
    """
    content = read_manifest(folder)
    manifest = from_bytes(content)
    check(manifest)
    return manifest, content


def damage_error(damages: Sequence[Damage], path: str | os.PathLike[str]) -> DamageError:
    """Return the error that lists damages."""
    lines = [str(damage) for damage in damages[:_MAX_LINES]]
    if len(damages) > _MAX_LINES:
        lines.append(f"and {len(damages) - _MAX_LINES} more")
    return DamageError(
        f"{os.fspath(path)} is damaged; nothing was changed:\n  "
        + "\n  ".join(lines)
        + "\nLoad an older checkpoint, or restore these files from a copy."
    )


def _open(
    state: Mapping[object, object],
    path: str | os.PathLike[str],
    *,
    peers: Peers,
    arrays: Arrays,
    strict: bool,
    stack: ExitStack,
) -> _Opened:
    """Plan on all ranks from one manifest, also if it is being replaced meanwhile."""
    for _ in range(_ATTEMPTS):
        with Agreement(peers, f"load from {os.fspath(path)!r}") as planning:
            folder = resolve(path)
            manifest, content = read_checked(folder)
            plan = match(state, manifest, peers=peers, arrays=arrays, strict=strict)
            reader = stack.enter_context(DataReader(folder, manifest))
            damages = _inspect(plan, reader)
            is_stale = bool(damages) and read_manifest(folder) != content
            # only now: sizes that files don't have are not allocated
            additions = [] if damages else _create(plan, arrays)
            planning.message = [xxhash.xxh3_128_hexdigest(content), is_stale]
        same = all(message == planning.messages[0] for message in planning.messages)
        if same and not is_stale:
            return _Opened(plan, list(_needs(plan.copies)), reader, damages, additions)
        reader.close()
    raise FolderError(
        f"the ranks read different manifests at {os.fspath(path)!r}, {_ATTEMPTS} times: they "
        f"don't see the same folder, or it is saved to all the time. Nothing was changed."
    )


def load_all(path: str | os.PathLike[str], *, arrays: Arrays, verify: bool) -> dict[object, object]:
    """Return everything in a checkpoint; see `hp_checkpoint.load_full`.

    Args:
        path: The checkpoint's folder.
        arrays: Makes tensors.
        verify: Whether to check checksums first.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    folder = resolve(path)
    manifest, _ = read_checked(folder)
    with DataReader(folder, manifest) as reader:
        damages = [damage for damage in map(reader.inspect, manifest.files) if damage is not None]
        if damages:
            raise damage_error(damages, path)
        leaves: list[tuple[KeyPath, object]] = []
        copies: list[TensorCopy] = []
        per_rank: dict[str, PerRank] = {}
        for entry in manifest.leaves:
            if isinstance(entry, ValueEntry):
                value = decode(entry.content, name=entry.name, arrays=arrays)
            else:
                value = arrays.new(entry.dtype, entry.shape, None)
                copies.append(TensorCopy(value, arrays.describe(value), entry))
            if entry.rank is None:
                leaves.append((entry.path, value))
                continue
            if entry.name not in per_rank:
                per_rank[entry.name] = PerRank({})
                leaves.append((entry.path, per_rank[entry.name]))
            per_rank[entry.name].values[entry.rank] = value
        needs = list(_needs(copies))
        damages = _verify(needs, reader) if verify else []
        if damages:
            raise damage_error(damages, path)
        _copy_all(needs, reader, arrays)
    return assemble(leaves)


def _inspect(plan: LoadPlan, reader: DataReader) -> list[Damage]:
    """Return what is wrong with the sizes and headers of the files that a plan needs."""
    files = {need.piece.file for need in _needs(plan.copies)}
    added = (entry for addition in plan.additions for _, entry in addition.tensors)
    files.update(piece.file for entry in added for piece in entry.pieces)
    return [damage for damage in map(reader.inspect, sorted(files)) if damage is not None]


def _create(plan: LoadPlan, arrays: Arrays) -> list[tuple[OpenDict, dict[object, object]]]:
    """Make the tensors that open dicts lack; they are filled with the others."""
    made: list[tuple[OpenDict, dict[object, object]]] = []
    for addition in plan.additions:
        leaves = list(addition.values)
        for rest, entry in addition.tensors:
            tensor = arrays.new(entry.dtype, entry.shape, addition.target.like)
            plan.copies.append(TensorCopy(tensor, arrays.describe(tensor), entry))
            leaves.append((rest, tensor))
        made.append((addition.target, assemble(leaves)))
    return made


def _needs(copies: Sequence[TensorCopy]) -> Iterator[_Need]:
    for copy in copies:
        for piece in copy.entry.pieces:
            overlap = piece.box.intersect(copy.info.box)
            if overlap is not None:
                yield _Need(copy, piece, overlap)


def _verify(needs: Sequence[_Need], reader: DataReader) -> list[Damage]:
    """Check each needed block once, however many tensors need it."""
    limits = Limits(slab_bytes=1 << 62, gap_bytes=BLOCK_BYTES)
    ranges: dict[tuple[str, int], tuple[_Need, list[tuple[int, int]]]] = {}
    for need in needs:
        found = ranges.setdefault((need.piece.file, need.piece.begin), (need, []))[1]
        found += [(slab.begin, slab.end) for slab in need.slabs(limits)]
    damages: list[Damage] = []
    for need, found in ranges.values():
        damages += reader.faults(need.copy.entry.name, need.piece, found)
    return damages


def _copy_all(needs: Sequence[_Need], reader: DataReader, arrays: Arrays) -> None:
    scratch = memoryview(bytearray(READ_BYTES))
    for need in needs:
        _copy(need, reader, arrays, scratch)
    for tensor in {id(need.copy.tensor): need.copy.tensor for need in needs}.values():
        arrays.touch(tensor)


def _copy(need: _Need, reader: DataReader, arrays: Arrays, scratch: memoryview) -> None:
    """Bring one overlap from a file to a tensor; straight into its memory where both are dense."""
    tensor, piece, info = need.copy.tensor, need.piece, need.copy.info
    dtype = DTYPES[info.dtype]
    view = arrays.view(tensor)
    strides = strides_of(piece.box.sizes, dtype.itemsize)
    for slab in need.slabs(_COPY_LIMITS):
        region = _shifted(slab.region, piece.box.offsets).relative_to(info.box)
        begin = piece.begin + slab.begin
        part = None if view is None else view[index_of(region)]
        length = slab.end - slab.begin
        if part is not None and part.flags.c_contiguous and part.nbytes == length:
            reader.read_into(piece.file, begin, as_bytes(part))
            continue
        data = scratch[:length]
        reader.read_into(piece.file, begin, data)
        values: np.ndarray = np.ndarray(slab.region.sizes, dtype.carrier, data, strides=strides)
        if part is None:
            arrays.write(tensor, region, np.ascontiguousarray(values))
        else:
            part[...] = values


def _shifted(region: Box, by: tuple[int, ...]) -> Box:
    offsets = tuple(offset + more for offset, more in zip(region.offsets, by, strict=True))
    return Box(offsets, region.sizes)
