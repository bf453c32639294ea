"""One save, from the lock to the moment it counts. Only group index 0 of the savers has one.

    the target             data goes to                       it counts when
    isn't there            a temporary folder beside it       this folder is renamed
    is a folder            the folder, under fresh names      the manifest is replaced

Either is one atomic call of the file system, made after everything it needs is on the disk. Before
it the old checkpoint is whole, after it the new one is; what is then unneeded is removed last.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hp_checkpoint.check import DATA_NAME
from hp_checkpoint.errors import (
    CheckpointError,
    ExistsError,
    ManifestError,
    NotFoundError,
    RankError,
)
from hp_checkpoint.folder import (
    MANIFEST,
    make_parents,
    mark_name,
    next_manifest_name,
    read_manifest,
    remove_temporary,
    remove_unnamed,
    sync_folder,
    temporary_folder,
    temporary_folders,
    write_durably,
)
from hp_checkpoint.lock import LOCK_NAME, PathLock, beside, claim
from hp_checkpoint.manifest import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hp_checkpoint.manifest import Manifest

_OURS = b'{"format":"hp-checkpoint",'


class Commit:
    """Begins a save to a path, then makes it count or undoes it.

    Args:
        target: The checkpoint's folder, as from `folder.resolve`.
        token: 16 random hex digits.
        world_size: How many ranks save.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        ExistsError: There is a checkpoint and it may not be replaced, or there is a file of
            another program in place of the manifest.
        LockedError: Another job is saving to this path.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hp_checkpoint.manifest import Manifest
        >>> target = Path(tempfile.mkdtemp()) / "step-1"
        >>> commit = Commit(target, "0123456789abcdef", 1, overwrite=False)
        >>> commit.finish(Manifest(1, 1 << 20, {}, ()))
        ''
        >>> [file.name for file in target.iterdir()]
        ['manifest.json']
    """

    def __init__(self, target: Path, token: str, world_size: int, *, overwrite: bool) -> None:
        self._target = target
        self._token = token
        _check_vacant(target, overwrite=overwrite)
        make_parents(target.parent)
        self._lock = PathLock(target)
        try:
            _check_vacant(target, overwrite=overwrite)
            self._old = _old_files(target)
            _clean_beside(target, self._lock.file)
            self.is_inside = target.is_dir()
            if self.is_inside:
                named, replaced = self._old
                remove_unnamed(target, named, replaced)
                self.folder = target
                write_durably(target / mark_name(token, world_size), b"")
                sync_folder(target)
            else:
                self.folder = temporary_folder(target, token)
                os.mkdir(self.folder)
        except BaseException:
            self._lock.release()
            raise

    def finish(self, manifest: Manifest) -> str:
        """Make the save count. All data files must be durable.

        Returns:
            What is doubtful about it, if anything: once a save counts nothing is raised.

        Raises:
            RankError: A data file isn't here with the size that its writer stated.
            OSError: The file system refuses.
        """
        self._check_files(manifest)
        if self.is_inside:
            named, replaced = self._old
            left = [name for name in replaced if os.path.lexists(self._target / name)]
            manifest = replace(manifest, replaces=tuple(sorted({*named, *left})))
            upcoming = self._target / next_manifest_name(self._token)
            write_durably(upcoming, to_bytes(manifest))
            sync_folder(self._target)
            os.replace(upcoming, self._target / MANIFEST)
        else:
            write_durably(self.folder / MANIFEST, to_bytes(manifest))
            sync_folder(self.folder)
            os.rename(self.folder, self._target)
        try:
            sync_folder(self._target if self.is_inside else self._target.parent)
        except OSError as error:
            self._lock.release()
            return (
                f"{self._target} is complete, but the disk failed ({error}): it may be lost if "
                f"the machine stops now. Save once more, to another disk."
            )
        with contextlib.suppress(OSError):  # the next save tries again
            if self.is_inside:
                files, old = frozenset(manifest.files), frozenset(manifest.replaces)
                remove_unnamed(self._target, files, old)
        self._lock.release()
        return ""

    def counts(self) -> bool:
        """Tell whether the save counts, by what is on the disk: an interrupt comes at any time."""
        try:
            names = from_bytes(read_manifest(self._target)).files
        except (CheckpointError, OSError):
            return False
        found = map(DATA_NAME.fullmatch, names)
        return any(match is not None and match[1] == self._token for match in found)

    def abort(self) -> None:
        """Undo what `Commit` did, unless the save counts already; idempotent.

        Data files that ranks of this save still hold locked stay for the next save to remove.
        """
        with contextlib.suppress(OSError):
            if self.counts():
                pass  # the next save removes what it replaced
            elif self.is_inside:
                named, replaced = self._old
                remove_unnamed(self._target, named, replaced)
            else:
                remove_temporary(self.folder)
        self._lock.release()

    def _check_files(self, manifest: Manifest) -> None:
        for name, file in manifest.files.items():
            path = self.folder / name
            size = path.stat().st_size if path.exists() else -1
            if size != file.num_bytes:
                found = "no such file" if size < 0 else f"{size} bytes"
                raise RankError(
                    f"{path} should have {file.num_bytes} bytes, found {found}: the file was "
                    f"changed by others, or the ranks don't see one file system."
                )


def _check_vacant(target: Path, *, overwrite: bool) -> None:
    """Raise if a manifest is in the way."""
    try:
        content = read_manifest(target)
    except NotFoundError:
        return
    except ManifestError as error:
        raise ExistsError(
            f"{target / MANIFEST} is in the way and can't be read: {error}"
        ) from error
    if not content.startswith(_OURS):
        raise ExistsError(
            f"{target / MANIFEST} is in the way: it isn't a manifest of hp-checkpoint, so it is "
            f"left alone. Save to another folder, or move it."
        )
    if not overwrite:
        raise ExistsError(
            f"{target} holds a checkpoint and overwrite=False. Choose another path, or pass "
            f"overwrite=True to replace it."
        )


def _old_files(target: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the data files that the manifest in place names and those it replaced.

    A damaged manifest proves nothing, so nothing it may have named is removed.
    """
    try:
        manifest = from_bytes(read_manifest(target))
    except (NotFoundError, ManifestError):
        return frozenset(), frozenset()
    return _data_names(manifest.files), _data_names(dict.fromkeys(manifest.replaces))


def _data_names(names: Mapping[str, object]) -> frozenset[str]:
    return frozenset(name for name in names if DATA_NAME.fullmatch(name))


def _clean_beside(target: Path, own: Path) -> None:
    """Remove what dead saves left beside the target, also those to other targets.

    Args:
        target: The checkpoint's folder.
        own: The lock file that is held.
    """
    parent = target.parent
    folders = temporary_folders(parent)
    locks = [beside(parent / name) for name, _ in folders]
    locks += [parent / name for name in os.listdir(parent) if LOCK_NAME.fullmatch(name)]
    for lock in dict.fromkeys(locks):
        context = contextlib.nullcontext(True) if lock == own else claim(lock)
        with contextlib.suppress(OSError), context as is_free:  # others may clean as well
            for name, folder in folders if is_free else ():
                if beside(parent / name) == lock:
                    remove_temporary(folder)
