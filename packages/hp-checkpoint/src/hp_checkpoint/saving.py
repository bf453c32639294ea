"""Saving, step by step; every step ends in agreement or in the same error on all ranks.

    step       each rank                                   group index 0 besides
    offer      names its leaves; nothing is written yet    chooses a token
    begin      -                                           locks the path, makes the folder
    meet       looks for what was made there               -
    write      writes its parts, durably                   -
    commit     -                                           writes the manifest, makes it count

An error before `commit` leaves the old checkpoint as it was and removes what was begun.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING, cast

from hp_checkpoint._version import __version__
from hp_checkpoint.agreement import Agreement
from hp_checkpoint.assignment import (
    Assignment,
    Offer,
    SavedTensor,
    TensorOffer,
    ValueOffer,
    assign,
    offer_to_json,
)
from hp_checkpoint.commit import Commit
from hp_checkpoint.errors import FolderError, RankError, StateError
from hp_checkpoint.folder import data_name, mark_name, resolve, temporary_folder
from hp_checkpoint.manifest import (
    BLOCK_BYTES,
    DataFile,
    Manifest,
    Piece,
    TensorEntry,
    ValueEntry,
)
from hp_checkpoint.ports import NoArrays
from hp_checkpoint.shardfile import FileLayout, lay_out
from hp_checkpoint.tree import Leaf, flatten, path_from_json, path_to_json
from hp_checkpoint.value import encode
from hp_checkpoint.writer import DataFileWriter, Source, Written, digest
from hp_mesh import Box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hp_checkpoint.ports import Arrays, Json, Peers

_PATIENCE_S = 2.0  # network file systems show a new name late
_PAUSE_S = 0.05


def save_state(
    state: Mapping[object, object],
    path: str | os.PathLike[str],
    *,
    peers: Peers,
    arrays: Arrays,
    overwrite: bool,
) -> None:
    """Save a state dict; see `hp_checkpoint.save`.

    Args:
        state: Nested dicts, lists and tuples of tensors and plain values.
        path: The checkpoint's folder.
        peers: The ranks that save together.
        arrays: Opens tensors.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        CheckpointError: One of the family, the same on all ranks; the old checkpoint is as it was.

    Example:
        >>> import tempfile
        >>> from hp_checkpoint.ports import Alone, NoArrays
        >>> folder = tempfile.mkdtemp()
        >>> save_state({"step": 3}, folder, peers=Alone(), arrays=NoArrays(), overwrite=True)
    """
    with Agreement(peers, f"save to {os.fspath(path)!r}") as offering:
        target = resolve(path)
        sources, offers = _offers(flatten(state, arrays), arrays, alone=len(peers.ranks) == 1)
        listed: list[Json] = [offer_to_json(o, path_to_json(o.path, arrays)) for o in offers]
        offering.message = {"token": secrets.token_hex(8), "offers": listed}
    messages = [cast("dict[str, Json]", message) for message in offering.messages]
    assignment = assign([_offers_from_json(message["offers"]) for message in messages])
    token = str(messages[0]["token"])
    _Save(target, token, peers, assignment).run(sources, arrays, overwrite=overwrite)


class _Save:
    """The steps that touch the disk."""

    def __init__(self, target: Path, token: str, peers: Peers, assignment: Assignment) -> None:
        self._target = target
        self._token = token
        self._peers = peers
        self._assignment = assignment
        self._commit: Commit | None = None
        self._writer: DataFileWriter | None = None
        self._phase = Agreement(peers, "save")
        self._is_committing = False

    def run(self, sources: dict[str, Source], arrays: Arrays, *, overwrite: bool) -> None:
        try:
            doubt = self._steps(sources, arrays, overwrite=overwrite)
        except BaseException as error:
            self._undo(together=self._phase.is_over and isinstance(error, Exception))
            raise
        if doubt:
            raise RankError(doubt)

    def _undo(self, *, together: bool) -> None:
        """Remove what was begun; if all ranks are here, data files first and the folder last.

        A rank that lost the others while group index 0 was committing can't know whether its file
        counts by now: it stays, and if it doesn't count the next save removes it.
        """
        if self._commit is not None:
            is_needed = self._commit.counts()
        else:
            is_needed = self._is_committing and not together
        with contextlib.suppress(OSError):
            if self._writer is not None and is_needed:
                self._writer.close()
            elif self._writer is not None:
                self._writer.discard()
        if together:
            self._peers.all_gather_bytes(b"")
        if self._commit is not None:
            self._commit.abort()

    def _agree(self, action: str) -> Agreement:
        self._phase = Agreement(self._peers, action)
        return self._phase

    def _steps(self, sources: dict[str, Source], arrays: Arrays, *, overwrite: bool) -> str:
        """Save; return what is doubtful about a save that counts, if anything."""
        peers, world_size = self._peers, len(self._peers.ranks)
        with self._agree(f"begin to save to {str(self._target)!r}") as beginning:
            if peers.index == 0:
                self._commit = Commit(self._target, self._token, world_size, overwrite=overwrite)
                beginning.message = self._commit.is_inside
        is_inside = bool(beginning.messages[0])
        folder = self._target if is_inside else temporary_folder(self._target, self._token)
        with self._agree("find the folder that rank 0 made"):
            self._meet(folder / mark_name(self._token, world_size) if is_inside else folder)
        layouts = [lay_out(parts) for parts in self._assignment.parts]
        with self._agree("write") as writing:
            layout = layouts[peers.index]
            if layout.parts:
                self._writer = DataFileWriter(folder / data_name(self._token, peers.index))
                written = self._writer.write(layout, sources, arrays)
                writing.message = _written_to_json(written)
        self._is_committing = True
        with self._agree("commit") as committing:
            if self._commit is not None:
                manifest = self._manifest(layouts, writing.messages)
                committing.message = self._commit.finish(manifest)
        if self._writer is not None:
            self._writer.close()
        return str(committing.messages[0])

    def _meet(self, made: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not os.path.lexists(made):
            if time.monotonic() >= deadline:
                raise FolderError(
                    f"{made} isn't there: this rank doesn't see the folder that group index 0 "
                    f"writes to. Pass a path on a file system that all ranks share. No data was "
                    f"written."
                )
            time.sleep(_PAUSE_S)

    def _manifest(self, layouts: Sequence[FileLayout], messages: Sequence[Json]) -> Manifest:
        files: dict[str, DataFile] = {}
        pieces: dict[tuple[str, int | None], list[Piece]] = {}
        for rank, (layout, message) in enumerate(zip(layouts, messages, strict=True)):
            if not layout.parts:
                continue
            name = data_name(self._token, rank)
            written = _written_from_json(message)
            files[name] = written.file
            for part, (begin, end), sums in zip(
                layout.parts, layout.ranges, written.checksums, strict=True
            ):
                piece = Piece(part.box, name, begin, end, sums)
                pieces.setdefault((part.name, part.rank), []).append(piece)
        leaves: list[TensorEntry | ValueEntry] = []
        for leaf in self._assignment.leaves:
            if isinstance(leaf, SavedTensor):
                entry = TensorEntry(leaf.path, leaf.dtype, leaf.shape, (), leaf.rank)
                found = sorted(
                    pieces.get((entry.name, leaf.rank), ()), key=lambda one: one.box.offsets
                )
                leaves.append(
                    TensorEntry(leaf.path, leaf.dtype, leaf.shape, tuple(found), leaf.rank)
                )
            else:
                leaves.append(ValueEntry(leaf.path, leaf.content, leaf.rank))
        return Manifest(
            world_size=len(self._peers.ranks),
            block_bytes=BLOCK_BYTES,
            files=files,
            leaves=tuple(leaves),
            software=f"hp-checkpoint {__version__}",
        )


def _offers(
    leaves: Sequence[Leaf], arrays: Arrays, *, alone: bool
) -> tuple[dict[str, Source], list[Offer]]:
    sources: dict[str, Source] = {}
    offers: list[Offer] = []
    for leaf in leaves:
        if not leaf.is_tensor:
            content = encode(leaf.value, name=leaf.name, arrays=arrays)
            offers.append(ValueOffer(leaf.path, content))
            continue
        try:
            info = arrays.describe(leaf.value)
        except StateError as error:
            raise StateError(f"{leaf.name}: {error}") from error
        sources[leaf.name] = source = Source(leaf.value, info)
        mark = ("alone" if alone else digest(source, arrays)) if info.is_plain else None
        offers.append(TensorOffer(leaf.path, info.dtype, info.shape, info.box, mark))
    return sources, offers


def _offers_from_json(content: Json) -> list[Offer]:
    """Read what another rank of this save sent: trusted, unlike a file."""
    offers: list[Offer] = []
    for one in cast("list[dict[str, Json]]", content):
        path = path_from_json(one["path"], NoArrays())
        if "value" in one:
            offers.append(ValueOffer(path, one["value"]))
            continue
        offsets, sizes = cast("list[int]", one["offsets"]), cast("list[int]", one["sizes"])
        offers.append(
            TensorOffer(
                path=path,
                dtype=cast("str", one["dtype"]),
                shape=tuple(cast("list[int]", one["shape"])),
                box=Box(tuple(offsets), tuple(sizes)),
                digest=cast("str | None", one["digest"]),
            )
        )
    return offers


def _written_to_json(written: Written) -> Json:
    file = written.file
    sums: list[Json] = [list(part) for part in written.checksums]
    return [file.num_bytes, file.header_bytes, file.header_checksum, sums]


def _written_from_json(content: Json) -> Written:
    size, header_bytes, header, sums = cast("tuple[int, int, str, list[list[str]]]", content)
    return Written(DataFile(size, header_bytes, header), tuple(tuple(part) for part in sums))
