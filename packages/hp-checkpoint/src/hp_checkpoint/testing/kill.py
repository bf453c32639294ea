"""Ends the process by SIGKILL at a chosen call to the file system: tests reach every moment.

Counted are the calls through which a save changes anything: `os.open` for writing, `write`,
`writev`, `fsync`, `mkdir`, `rename`, `replace`, `unlink`, `rmdir`. The switch kills *before* the
call of the chosen number; a chosen write is first done by half.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALLS = ("open", "write", "writev", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class KillSwitch:
    """Counts calls, and kills at one of them.

    Args:
        moment: The number of the call to die at, counted from 1; 0: never, only count.
        victims: Processes to kill together; none: this one.

    Example:
        >>> switch = KillSwitch(0)
        >>> switch.arm()
        >>> _ = os.write(os.open(os.devnull, os.O_WRONLY), b"x")
        >>> switch.disarm()
        >>> switch.calls
        [('open', '/dev/null'), ('write', '/dev/null')]
    """

    def __init__(self, moment: int, *, victims: Sequence[int] = ()) -> None:
        self._moment = moment
        self._victims = victims
        self._real: dict[str, Callable[..., Any]] = {}
        self.calls: list[tuple[str, str]] = []

    def arm(self) -> None:
        """Start to count."""
        for name in _CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._counted(name))

    def disarm(self) -> None:
        """Stop to count."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def _counted(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401  # any function of os
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **options)
            self.calls.append((name, self._about(args[0])))
            if len(self.calls) == self._moment:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                elif name == "writev":
                    real(args[0], [args[1][0][: args[1][0].nbytes // 2]])
                self._kill()
            return real(*args, **options)

        return call

    def _about(self, target: object) -> str:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        return os.fspath(target)  # type: ignore[call-overload,no-any-return]  # a path, for os

    def _kill(self) -> None:
        for pid in (*self._victims, os.getpid()):
            os.kill(pid, signal.SIGKILL)
