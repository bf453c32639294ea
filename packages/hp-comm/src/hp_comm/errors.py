"""The errors of hp_comm.

error              raised when
CommError          a call's arguments don't fit the operation or the group
TransportError     a transport that was asked for by name can't serve this group
MismatchError      ranks of one group made different calls at the same place
CommTimeoutError   a wait ended before all ranks arrived; names who is missing
TransferError      a collective failed under way, and nobody knows which rank broke it
"""

from __future__ import annotations


class CommError(ValueError):
    """A collective was asked for something it can't do; nothing was sent or changed.

    The classes below say more, and after the last three of them the group is of no more use.
    """


class TransportError(CommError, RuntimeError):
    """The transport asked for by name can't serve this group; says why and what would."""


class MismatchError(CommError, RuntimeError):
    """Ranks of one group are at different calls; says which rank is at which."""


class TransferError(CommError, RuntimeError):
    """A collective failed under way; says what the transport found.

    Args:
        operation: What failed, for example "all_reduce".
        group: Name of the group.
        sequence: Number of the call in this group, counted from 1.
        reason: What the transport said.

    Example:
        >>> print(TransferError("all_reduce", "dp", 7, "Connection closed by peer"))
        all_reduce number 7 of group 'dp' failed: Connection closed by peer. Look at the other \
ranks' logs for the one that ended first, and start the job again.
    """

    def __init__(self, operation: str, group: str, sequence: int, reason: str) -> None:
        self.operation = operation
        self.group = group
        self.sequence = sequence
        self.reason = reason
        super().__init__(
            f"{operation} number {sequence} of group {group!r} failed: {reason}. Look at the other "
            f"ranks' logs for the one that ended first, and start the job again."
        )


class CommTimeoutError(CommError, TimeoutError):
    """A wait ended by its time-out.

    Args:
        operation: What was waited for, for example "all_reduce" or "gather of layers.3".
        group: Name of the group.
        sequence: Number of the call in this group, counted from 1.
        missing: Global ranks that had not arrived.
        timeout_s: How long was waited, in seconds.

    Example:
        >>> print(CommTimeoutError("all_reduce", "dp", 7, (3,), 5.0))
        all_reduce number 7 of group 'dp' waited 5.0 s and rank 3 did not arrive. Look at that \
rank's log for an earlier error or another order of calls; raise timeout_s if it is only slow.
    """

    def __init__(
        self, operation: str, group: str, sequence: int, missing: tuple[int, ...], timeout_s: float
    ) -> None:
        self.operation = operation
        self.group = group
        self.sequence = sequence
        self.missing = missing
        self.timeout_s = timeout_s
        waited = f"{operation} number {sequence} of group {group!r} waited {timeout_s} s"
        if not missing:
            super().__init__(
                f"{waited} though every rank arrived: the transfer is stuck or slow. Look at the "
                f"network between the hosts, or raise timeout_s."
            )
            return
        word = "rank" if len(missing) == 1 else "ranks"
        super().__init__(
            f"{waited} and {word} {', '.join(map(str, missing))} did not arrive. Look at that "
            f"rank's log for an earlier error or another order of calls; raise timeout_s if it is "
            f"only slow."
        )
