"""Which text the demo reads, how it is split, and in which order its windows come."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.demo.options import DemoOptions, ModelShape
from hyper_parallel.demo.run import read_text
from hyper_parallel.demo.text import (
    WindowOrder,
    count_windows,
    read_folder,
    read_stdlib,
    spread_windows,
)
from hyper_parallel.errors import DemoError


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_stdlib_has_megabytes_on_both_sides_and_no_file_twice() -> None:
    corpus = read_stdlib()

    assert len(corpus.train) > 3_000_000
    assert len(corpus.validation) > 100_000
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert not any("test" in Path(name).parts for name in corpus.train_files)


def test_split_puts_one_path_on_one_side_whatever_else_is_there(tmp_path: Path) -> None:
    files = {f"{number}.txt": f"text {number}".encode() for number in range(200)}
    # The rule as it is stated: the first 8 bytes of the path's hash, below 1/16 of their range.
    kept = {
        name for name in files if hashlib.sha256(name.encode()).hexdigest()[:16] < "1" + "0" * 15
    }

    corpus = read_folder(_write(tmp_path, files))

    assert 0 < len(kept) < 40
    assert set(corpus.validation_files) == kept
    assert set(corpus.train_files) == set(files) - kept
    assert corpus.validation == b"".join(files[n] + b"\0" for n in sorted(kept))


def test_folder_leaves_out_copies_binaries_hidden_and_caches(tmp_path: Path) -> None:
    good = {"a.py": b"alpha", "b/c.rst": b"beta"}
    bad = {
        "copy.py": b"alpha",
        "empty.py": b"",
        "library.so": b"\x7fELF\0\0",
        ".git/config": b"hidden",
        ".hidden": b"hidden too",
        "__pycache__/a.py": b"cache",
        "site-packages/x.py": b"foreign",
    }

    corpus = read_folder(_write(tmp_path, good | bad))

    assert set(corpus.train_files) | set(corpus.validation_files) == set(good)


def test_two_files_make_one_for_each_side(tmp_path: Path) -> None:
    corpus = read_folder(_write(tmp_path, {"a": b"alpha", "b": b"beta"}))

    assert (len(corpus.train_files), len(corpus.validation_files)) == (1, 1)


def test_folder_with_one_text_raises(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="holds 1 different text files: at least 2 are needed"):
        read_folder(_write(tmp_path, {"a": b"alpha", "b": b"alpha"}))


def test_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="isn't a folder"):
        read_folder(tmp_path / "none")


@pytest.mark.parametrize(
    ("context", "message"),
    [(100, "bytes to train on, less than one batch of 12"), (64, None)],
    ids=["one byte too few", "just enough"],
)
def test_text_needs_one_batch_to_train_on(
    tmp_path: Path, context: int, message: str | None
) -> None:
    folder = _write(tmp_path, {"a": b"a" * 1199, "b": b"b" * 1199})  # each side 1200 with its end
    options = DemoOptions(text=folder, model=ModelShape(context=context))

    if message is None:
        assert len(read_text(options).train) == 1200
        return
    with pytest.raises(DemoError, match=message):
        read_text(options)


@given(num_bytes=st.integers(0, 10_000), context=st.integers(1, 300))
def test_windows_all_have_their_next_byte(num_bytes: int, context: int) -> None:
    windows = count_windows(num_bytes, context)

    assert windows == 0 or windows * context + 1 <= num_bytes
    assert (windows + 1) * context + 1 > num_bytes


@given(
    num_windows=st.integers(1, 50),
    seed=st.integers(0, 5),
    position=st.integers(0, 200),
    cut=st.integers(0, 30),
)
def test_order_from_any_position_goes_on_where_it_was(
    num_windows: int, seed: int, position: int, cut: int
) -> None:
    order = WindowOrder(num_windows, seed)

    whole = order.windows(position, 30)

    assert order.windows(position, cut) + order.windows(position + cut, 30 - cut) == whole


@given(num_windows=st.integers(1, 50), turn=st.integers(0, 3))
def test_order_visits_every_window_once_per_round(num_windows: int, turn: int) -> None:
    visited = WindowOrder(num_windows, seed=0).windows(turn * num_windows, num_windows)

    assert sorted(visited) == list(range(num_windows))


def test_order_depends_on_seed_and_round() -> None:
    first = WindowOrder(100, seed=0).windows(0, 100)

    assert first != WindowOrder(100, seed=1).windows(0, 100)
    assert first != WindowOrder(100, seed=0).windows(100, 100)


@given(num_windows=st.integers(1, 1000), count=st.integers(1, 300))
def test_spread_windows_ascend_and_stay_inside(num_windows: int, count: int) -> None:
    windows = spread_windows(num_windows, count)

    assert len(windows) == count
    assert windows == sorted(windows)
    assert 0 <= windows[0] <= windows[-1] < num_windows
    assert num_windows < count or len(set(windows)) == count
