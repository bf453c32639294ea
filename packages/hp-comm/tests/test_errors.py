"""Errors are of the classes that callers catch, and say who is missing."""

import pytest

from hp_comm import CommError, CommTimeoutError, MismatchError, TransferError, TransportError


@pytest.mark.parametrize(
    ("error", "also"),
    [
        (CommError("x"), ValueError),
        (TransportError("x"), RuntimeError),
        (MismatchError("x"), RuntimeError),
        (TransferError("barrier", "dp", 1, "reset"), RuntimeError),
        (CommTimeoutError("barrier", "dp", 1, (2,), 3.0), TimeoutError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_error_is_also_a_builtin_one(error: Exception, also: type[Exception]) -> None:
    assert isinstance(error, CommError)
    assert isinstance(error, also)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ((3,), "all_reduce number 7 of group 'dp' waited 5.0 s and rank 3 did not arrive"),
        ((1, 3), "and ranks 1, 3 did not arrive"),
        ((), "though every rank arrived"),
    ],
)
def test_time_out_names_operation_group_number_and_ranks(
    missing: tuple[int, ...], text: str
) -> None:
    error = CommTimeoutError("all_reduce", "dp", 7, missing, 5.0)
    assert text in str(error)
    assert (error.operation, error.group, error.sequence) == ("all_reduce", "dp", 7)
    assert (error.missing, error.timeout_s) == (missing, 5.0)


def test_failed_transfer_names_operation_group_number_and_reason() -> None:
    error = TransferError("all_reduce", "dp", 7, "Connection reset by peer")
    assert "all_reduce number 7 of group 'dp' failed: Connection reset by peer. Look" in str(error)
    assert (error.operation, error.group, error.sequence) == ("all_reduce", "dp", 7)
    assert error.reason == "Connection reset by peer"
