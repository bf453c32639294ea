"""Transport and time-out by argument and environment variable."""

import pytest

from hp_comm import CommError
from hp_comm.settings import choose_timeout, choose_transport


@pytest.mark.parametrize(
    ("asked", "variable", "chosen"),
    [
        ("auto", None, "auto"),
        ("auto", "gloo", "gloo"),
        ("shm", "gloo", "shm"),
        ("auto", "auto", "auto"),
        ("nccl", None, "nccl"),
    ],
)
def test_choose_transport(
    asked: str, variable: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HP_TRANSPORT", raising=False)
    if variable:
        monkeypatch.setenv("HP_TRANSPORT", variable)
    assert choose_transport(asked) == chosen


@pytest.mark.parametrize("name", ["", "Shm", "tcp"])
def test_choose_transport_of_unknown_name_lists_the_choices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_TRANSPORT", name)
    with pytest.raises(CommError, match=r"Pass one of \('auto', 'shm', 'gloo', 'nccl', 'hccl'\)"):
        choose_transport("auto")


@pytest.mark.parametrize(
    ("asked", "variable", "chosen"),
    [(None, None, 300.0), (None, "12.5", 12.5), (7, "12.5", 7.0), (0.25, None, 0.25)],
)
def test_choose_timeout(
    asked: float | None, variable: str | None, chosen: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HP_TIMEOUT_S", raising=False)
    if variable:
        monkeypatch.setenv("HP_TIMEOUT_S", variable)
    assert choose_timeout(asked) == chosen


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "inf"])
def test_choose_timeout_of_no_positive_number_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_TIMEOUT_S", value)
    with pytest.raises(
        CommError, match=f"'{value}' s was asked for .* Pass a finite number above 0"
    ):
        choose_timeout(None)
