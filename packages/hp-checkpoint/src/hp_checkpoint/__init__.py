"""Sharded checkpoints that survive a kill and load on another number of ranks."""

from hp_checkpoint._version import __version__
from hp_checkpoint.api import load, load_full, save
from hp_checkpoint.errors import (
    CheckpointError,
    DamageError,
    ExistsError,
    FolderError,
    LockedError,
    ManifestError,
    MatchError,
    NotFoundError,
    RankError,
    StateError,
    VersionError,
)
from hp_checkpoint.inspection import read_metadata, verify
from hp_checkpoint.loading import PerRank
from hp_checkpoint.manifest import DataFile, Manifest, Piece, TensorEntry, ValueEntry
from hp_checkpoint.match import LoadReport
from hp_checkpoint.optimizer import load_optimizer_state, optimizer_state
from hp_checkpoint.reader import Damage
from hp_checkpoint.tree import OpenDict

__all__ = [
    "CheckpointError",
    "Damage",
    "DamageError",
    "DataFile",
    "ExistsError",
    "FolderError",
    "LoadReport",
    "LockedError",
    "Manifest",
    "ManifestError",
    "MatchError",
    "NotFoundError",
    "OpenDict",
    "PerRank",
    "Piece",
    "RankError",
    "StateError",
    "TensorEntry",
    "ValueEntry",
    "VersionError",
    "__version__",
    "load",
    "load_full",
    "load_optimizer_state",
    "optimizer_state",
    "read_metadata",
    "save",
    "verify",
]
