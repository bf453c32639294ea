"""How a process ends in which a native collective never will.

Note [native calls that never return]
    gloo can't cancel a collective. Its process group's destructor waits for it, so after a
    time-out both `destroy_process_group` and the end of the interpreter would hang for as long as
    the missing rank does. The group is therefore kept alive here, and if the collective still
    hasn't ended when the interpreter does, the process leaves at once, with exit code 1.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

EXIT_CODE = 1

_stuck: list[tuple[dist.Work, dist.ProcessGroup, str]] = []


def keep_until_exit(work: dist.Work, group: dist.ProcessGroup, text: str) -> None:
    """Keep a group whose collective timed out; see Note [native calls that never return]."""
    if not _stuck:
        atexit.register(_leave)
    _stuck.append((work, group, text))


def _leave() -> None:
    pending = [text for work, _group, text in _stuck if not work.is_completed()]
    if pending:
        print(f"hp_comm: {pending[0]} never ended: leaving with exit code {EXIT_CODE}",
              file=sys.stderr)  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)
