"""What a check of the conformance suite expects: values, an error, or events of a trace."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hp_comm.testing.values import Floats, read
from hp_comm.trace import CommTrace

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm.ports import Array, ArrayOps, Communicator

E = TypeVar("E", bound=BaseException)
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2}


def expect(
    ops: ArrayOps, found: Array, wanted: Floats, dtype: str, what: str, *, exact: bool = True
) -> None:
    """Raise unless an array has this data type and these values.

    Args:
        ops: The framework's operations.
        found: What is judged.
        wanted: float64, of the same shape.
        dtype: Data type by name.
        what: For the error.
        exact: Whether the values must be equal, or close as far as the data type goes.

    Raises:
        AssertionError: It differs; the message shows where.
    """
    assert ops.dtype_of(found) == dtype, f"{what}: {ops.dtype_of(found)} instead of {dtype}"
    tolerance = 0.0 if exact else TOLERANCE.get(dtype, 1e-6)
    np.testing.assert_allclose(
        read(ops, found), wanted, rtol=tolerance, atol=0, err_msg=what, strict=True
    )


def fails(kind: type[E], call: Callable[[], object], what: str) -> E:
    """Return the error that a call must raise.

    Args:
        kind: Class of the error.
        call: What must fail.
        what: For the error if it doesn't.

    Raises:
        AssertionError: It doesn't fail.

    Example:
        >>> fails(ZeroDivisionError, lambda: 1 / 0, "division")
        ZeroDivisionError('division by zero')
    """
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{what}: {kind.__name__} was expected and nothing was raised")


def traced(comm: Communicator, call: Callable[[], object]) -> tuple[CommTrace, list[int]]:
    """Return the trace of a call that all ranks make, and the group indices that it covers.

    A trace sees its whole process: all ranks where they are threads, else this one only.

    Args:
        comm: The group.
        call: What is traced.

    Example:
        >>> from hp_comm.testing import run_threads
        >>> traces = run_threads(lambda comm: traced(comm, comm.barrier), 2)
        >>> [(trace.counts(), indices) for trace, indices in traces]
        [({'barrier': 2}, [0, 1]), ({'barrier': 2}, [0, 1])]
    """
    own = str(os.getpid()).encode()
    with CommTrace() as trace:
        here = comm.all_gather_bytes(own)  # uncounted: now everybody's trace is open
        call()
        comm.all_gather_bytes(b"")
    return trace, [index for index, process in enumerate(here) if process == own]
