"""The tensor operations over numpy; `torch/test_ops.py` holds torch's to the same cases."""

import numpy as np
import pytest

from hp_comm import CommError
from hp_comm.testing import NumpyOps
from hp_mesh import Box

OPS = NumpyOps()


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(CommError, match="numpy has no data type 'bfloat16'"):
        OPS.empty((1,), "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "values", "factor", "scaled"),
    [
        ("float32", [1.0, -3.0], 0.5, [0.5, -1.5]),
        ("int64", [7, -7, 6, -6], 0.5, [3, -3, 3, -3]),
        ("int8", [127, -128], 1 / 3, [42, -42]),
        ("uint8", [255, 7], 0.25, [63, 1]),
    ],
)
def test_scale_divides_integers_towards_zero(
    dtype: str, values: list[float], factor: float, scaled: list[float]
) -> None:
    array = np.array(values, dtype)
    OPS.scale(array, factor)
    assert array.tolist() == scaled
    assert array.dtype == dtype


def test_from_buffer_shares_the_buffers_memory() -> None:
    buffer = bytearray(16)
    array = OPS.from_buffer(memoryview(buffer), (3,), "int32", 4)
    array[:] = [1, 2, 3]
    assert np.frombuffer(buffer, np.int32).tolist() == [0, 1, 2, 3]


def test_box_is_a_view() -> None:
    array = np.zeros((3, 4))
    OPS.fill_zero(OPS.box(array, Box((1, 1), (2, 2))))
    OPS.box(array, Box((1, 1), (2, 2)))[...] = 5
    assert array.sum() == 20


def test_box_of_no_dims_is_a_view() -> None:
    array = np.zeros(())
    OPS.box(array, Box((), ()))[...] = 5
    assert array.item() == 5


def test_reshape_that_would_copy_is_an_error() -> None:
    with pytest.raises(AssertionError, match="a view was asked for"):
        OPS.reshape(np.zeros((4, 4))[:, :2], (8,))


@pytest.mark.parametrize(
    ("array", "length", "found"),
    [
        pytest.param(np.arange(6.0)[:4], 6, [0, 1, 2, 3, 4, 5], id="room behind"),
        pytest.param(np.arange(6.0)[:4].reshape(2, 2), 5, [0, 1, 2, 3, 4], id="2 dims"),
        pytest.param(np.arange(6.0)[2:4], 4, [2, 3, 4, 5], id="in the middle"),
        pytest.param(np.arange(6.0), 6, [0, 1, 2, 3, 4, 5], id="no padding"),
        pytest.param(np.arange(6.0)[:4], 7, None, id="too little room"),
        pytest.param(np.arange(6.0)[::2], 3, None, id="not contiguous"),
        pytest.param(np.arange(6.0).view(np.float32)[:2], 3, None, id="memory of another type"),
    ],
)
def test_extend_gives_memory_only_where_there_is_room(
    array: np.ndarray, length: int, found: list[float] | None
) -> None:
    extended = OPS.extend(array, length)
    assert (None if extended is None else extended.tolist()) == found
    assert extended is None or np.shares_memory(extended, array)
