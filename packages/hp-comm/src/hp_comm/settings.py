"""Which transport and which time-out a user asked for, by argument or environment variable."""

from __future__ import annotations

import math
import os
from typing import Literal, cast, get_args

from hp_comm.errors import CommError

Transport = Literal["auto", "shm", "gloo", "nccl", "hccl"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
TRANSPORT_VARIABLE = "HP_TRANSPORT"
TIMEOUT_VARIABLE = "HP_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0


def choose_transport(asked: str) -> Transport:
    """Return the transport asked for; the environment variable replaces "auto".

    Raises:
        CommError: It isn't a known one; the message lists those that are.

    Example:
        >>> choose_transport("shm")
        'shm'
    """
    chosen = asked
    if asked == "auto":
        chosen = os.environ.get(TRANSPORT_VARIABLE, asked)
    if chosen not in TRANSPORTS:
        raise CommError(
            f"transport {chosen!r} isn't known. Pass one of {TRANSPORTS}, or set "
            f"{TRANSPORT_VARIABLE} to one."
        )
    return cast("Transport", chosen)


def choose_timeout(asked_s: float | None) -> float:
    """Return the time-out of waits in seconds: the argument, the environment's, or 300.

    Raises:
        CommError: It isn't a finite number above 0.

    Example:
        >>> choose_timeout(5)
        5.0
    """
    value = os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S) if asked_s is None else asked_s
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise CommError(
            f"a time-out of {value!r} s was asked for (argument timeout_s, or "
            f"{TIMEOUT_VARIABLE}). Pass a finite number above 0."
        )
    return number
