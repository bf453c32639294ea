"""The errors of hyper_parallel, and the exit codes that the command makes of them.

error            raised when                                             exit code
DemoError        the demo was asked for something it can't do            2
RankError        a rank of the demo ended before its work was done       1
DemoInterrupted  Ctrl-C or a request to end; a `BaseException`, so that  128 + signal
                 nothing on the way takes it for a failure
"""

from __future__ import annotations

import signal


class DemoError(ValueError):
    """The demo was asked for something it can't do; no rank was started."""


class RankError(RuntimeError):
    """A rank ended before its work was done; says which, how, and where its log is."""


class DemoInterrupted(BaseException):
    """The demo was told to end by a signal; all its ranks have ended.

    Args:
        signum: Number of the signal.
        saved: A sentence that says what was done and saved.

    Example:
        >>> DemoInterrupted(signal.SIGINT).exit_code
        130
    """

    def __init__(self, signum: int, saved: str = "") -> None:
        self.signum = signum
        super().__init__(f"ended by {signal.Signals(signum).name}. {saved}".strip())

    @property
    def exit_code(self) -> int:
        """What a shell expects of a command that a signal ended."""
        return 128 + self.signum
