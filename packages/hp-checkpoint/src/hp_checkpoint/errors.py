"""The errors of hp_checkpoint. Whatever is raised, no target tensor and no old checkpoint changed.

    error              raised when
    CheckpointError    the family; nothing else is raised for a user's or a disk's mistake
    StateError         a state dict holds something that can't be saved
    MatchError         a state dict and a checkpoint don't fit; lists every misfit
    NotFoundError      the path holds no checkpoint
    ExistsError        the path is taken and may not be overwritten
    LockedError        another job is saving to the path
    FolderError        the ranks don't see the same folder
    ManifestError      the manifest is damaged or not acceptable
    VersionError       the manifest is of a newer format
    DamageError        data files are missing, cut or changed; lists file, tensor and byte range
    RankError          a rank failed for an outside reason, for example a full disk

The one exception to the head line: a `RankError` in the copying pass of a load (a disk that fails
between two reads of the same bytes) says so itself.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """Something about saving or loading went wrong; the message says what to do."""


class StateError(CheckpointError):
    """A state dict holds something that can't be saved; names the key, nothing was written."""


class MatchError(CheckpointError):
    """A state dict and a checkpoint don't fit; lists key, wanted and found of every misfit."""


class NotFoundError(CheckpointError, FileNotFoundError):
    """The path holds no checkpoint."""


class ExistsError(CheckpointError, FileExistsError):
    """The path is taken: `overwrite=False`, or it is something else than a folder."""


class LockedError(CheckpointError):
    """Another living job is saving to this path; names its process."""


class FolderError(CheckpointError):
    """The ranks don't see the same folder; names who doesn't. No data was written."""


class ManifestError(CheckpointError):
    """The manifest is damaged, inconsistent or tries something it may not."""


class VersionError(ManifestError):
    """The manifest is of a format that this version doesn't know."""


class DamageError(CheckpointError):
    """Data that a load needs is missing, cut or changed; names file, tensor and byte range."""


class RankError(CheckpointError, RuntimeError):
    """A rank failed for an outside reason (disk full, no permission); every rank raises it."""


BY_NAME: dict[str, type[CheckpointError]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        StateError,
        MatchError,
        NotFoundError,
        ExistsError,
        LockedError,
        FolderError,
        ManifestError,
        VersionError,
        DamageError,
        RankError,
    )
}
"""Every class by name: an error crosses ranks as (name, message)."""
