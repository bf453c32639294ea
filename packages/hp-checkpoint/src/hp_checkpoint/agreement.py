"""All ranks go on, or all raise the same error.

Every rank enters each phase with `Agreement`, does its part and may leave a message. At the end the
ranks exchange messages or errors in one collective; if any rank failed, all raise.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from hp_checkpoint.errors import BY_NAME, CheckpointError, RankError
from hp_checkpoint.value import json_text

if TYPE_CHECKING:
    from types import TracebackType

    from hp_checkpoint.ports import Json, Peers

A = TypeVar("A", bound="Agreement")
_MAX_LINES = 20


class Agreement:
    """A phase that succeeds on all ranks or on none.

    Args:
        peers: The ranks.
        action: What they do, for errors: "write", "verify" ...

    Example:
        >>> from hp_checkpoint.ports import Alone
        >>> with Agreement(Alone(), "count") as agreement:
        ...     agreement.message = 7
        >>> agreement.messages
        [7]
    """

    def __init__(self, peers: Peers, action: str) -> None:
        self._peers = peers
        self._action = action
        self.message: Json = None
        self.messages: list[Json] = []
        self.is_over = False

    def __enter__(self: A) -> A:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: the ranks that wait are told by their time-out
        own: dict[str, Json] = {"message": self.message}
        if error is not None:
            own = {"error": self._describe(error)}
        replies = self._peers.all_gather_bytes(json_text(own).encode("ascii"))
        self.is_over = True  # all ranks came this far
        parsed: list[dict[str, Json]] = [json.loads(reply) for reply in replies]
        failed = {rank: reply["error"] for rank, reply in enumerate(parsed) if "error" in reply}
        if not failed:
            self.messages = [reply["message"] for reply in parsed]
            return
        if error is not None and not isinstance(error, (CheckpointError, OSError, MemoryError)):
            return  # a fault of ours: its own trace says more
        raise self._combine(failed) from error

    def _describe(self, error: Exception) -> Json:
        if isinstance(error, CheckpointError):
            return [type(error).__name__, str(error)]
        return ["RankError", f"{type(error).__name__}: {error}"]

    def _combine(self, failed: dict[int, Json]) -> CheckpointError:
        kinds: list[str] = []
        ranks: dict[str, list[int]] = {}
        for rank, reply in failed.items():
            assert isinstance(reply, list)
            kinds.append(str(reply[0]))
            ranks.setdefault(str(reply[1]), []).append(self._peers.ranks[rank])
        kind = BY_NAME.get(kinds[0], RankError) if len(set(kinds)) == 1 else RankError
        if len(self._peers.ranks) == 1 and kind is not RankError:
            return kind(next(iter(ranks)))
        lines = [f"{_ranks_text(who)}: {text}" for text, who in ranks.items()]
        if len(lines) > _MAX_LINES:
            lines = [*lines[:_MAX_LINES], f"and {len(lines) - _MAX_LINES} other messages"]
        return kind(f"could not {self._action}. " + "\n".join(lines))


def _ranks_text(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
