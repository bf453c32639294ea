"""The errors of hp_fully_shard.

error               raised when
FullyShardError     an argument of `fully_shard` or of a method of a sharded module is wrong
UnsupportedError    the request is sound, but this version can't do it yet
ShardedStateError   a sharded module is used in a way that its state forbids
"""

from __future__ import annotations


class FullyShardError(ValueError):
    """An argument is wrong; nothing was changed."""


class UnsupportedError(FullyShardError, NotImplementedError):
    """The request makes sense, but this version doesn't do it; says what does."""


class ShardedStateError(FullyShardError, RuntimeError):
    """A sharded module is in a state that forbids the call; says how to get out of it."""
