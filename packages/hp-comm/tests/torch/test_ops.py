"""The tensor operations over torch agree with numpy's, and stay outside autograd."""

import numpy as np
import pytest
import torch

from hp_comm import CommError
from hp_comm._torch import TorchOps
from hp_comm.testing import NumpyOps
from hp_mesh import Box

OPS, NUMPY = TorchOps("cpu"), NumpyOps()
DTYPES = ("float32", "float64", "float16", "int32", "int64", "int8", "uint8")


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16", "bool", "float8_e4m3fn", "complex64"])
def test_dtypes_go_by_name(dtype: str) -> None:
    array = OPS.empty((2, 3), dtype)
    assert OPS.dtype_of(array) == dtype
    assert tuple(array.shape) == (2, 3)


@pytest.mark.parametrize("name", ["float7", "nn", "Tensor"])
def test_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(CommError, match=f"torch has no data type '{name}'"):
        OPS.empty((1,), name)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_equals_numpys(dtype: str, op: str) -> None:
    random = np.random.default_rng(0)
    left, right = random.integers(0, 11, size=(2, 20)).astype(dtype)
    ours = torch.from_numpy(left.copy())
    OPS.combine(ours, torch.from_numpy(right), op)
    NUMPY.combine(left, right, op)
    np.testing.assert_array_equal(ours.numpy(), left)


@pytest.mark.parametrize("factor", [0.5, 1 / 3, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_equals_numpys(dtype: str, factor: float) -> None:
    values = np.arange(-20, 21).astype(dtype)
    ours = torch.from_numpy(values.copy())
    OPS.scale(ours, factor)
    NUMPY.scale(values, factor)
    rounding = 1e-3 if dtype == "float16" else 0  # numpy rounds the factor as well
    np.testing.assert_allclose(ours.numpy(), values, rtol=rounding)


def test_add_writes_into_the_target_which_may_be_an_input() -> None:
    left = torch.tensor([1.0, 2.0])
    OPS.add(left, left, torch.tensor([10.0, 20.0]))
    assert left.tolist() == [11.0, 22.0]


def test_copy_casts_and_is_no_part_of_autograd() -> None:
    source = torch.tensor([1.5, 2.5], requires_grad=True)
    target = OPS.empty((2,), "bfloat16")
    OPS.copy(target, source)
    assert target.tolist() == [1.5, 2.5]
    assert not target.requires_grad
    OPS.copy(source, torch.tensor([3.0, 4.0]))  # in place on a leaf
    assert source.tolist() == [3.0, 4.0]


def test_views_of_a_parameter_are_no_part_of_autograd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    view = OPS.box(parameter, Box((1, 0), (2, 2)))
    flat = OPS.reshape(parameter, (8,))
    assert not view.requires_grad
    assert not flat.requires_grad
    view.fill_(1.0)
    assert parameter.sum().item() == 4.0


def test_reshape_that_would_copy_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="view"):
        OPS.reshape(torch.zeros(4, 4)[:, :2], (8,))


def test_from_buffer_shares_the_buffers_memory() -> None:
    buffer = bytearray(16)
    OPS.from_buffer(memoryview(buffer), (3,), "int32", 4).copy_(torch.tensor([1, 2, 3]))
    assert np.frombuffer(buffer, np.int32).tolist() == [0, 1, 2, 3]


def test_memory_made_in_inference_mode_is_ordinary() -> None:
    with torch.inference_mode():
        made = [
            OPS.empty((2,), "float32"),
            OPS.from_buffer(memoryview(bytearray(8)), (2,), "float32", 0),
            OPS.from_buffer(memoryview(b""), (0,), "float32", 0),
        ]
    for array in made:
        assert not array.is_inference()


def test_empty_buffer_is_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        array = OPS.from_buffer(memoryview(b""), (0,), "float32", 0)
    assert array.device.type == "cpu"


def test_from_buffer_of_no_element_is_empty() -> None:
    assert OPS.from_buffer(memoryview(b""), (0, 3), "float32", 0).shape == (0, 3)


@pytest.mark.parametrize(
    ("array", "length", "found"),
    [
        pytest.param(torch.arange(6.0)[:4], 6, [0, 1, 2, 3, 4, 5], id="room behind"),
        pytest.param(torch.arange(6.0)[:4].view(2, 2), 5, [0, 1, 2, 3, 4], id="2 dims"),
        pytest.param(torch.arange(6.0)[2:4], 4, [2, 3, 4, 5], id="in the middle"),
        pytest.param(torch.arange(6.0)[:4], 7, None, id="too little room"),
        pytest.param(torch.arange(6.0)[::2], 3, None, id="not contiguous"),
    ],
)
def test_extend_gives_memory_only_where_there_is_room(
    array: torch.Tensor, length: int, found: list[float] | None
) -> None:
    extended = OPS.extend(array, length)
    assert (None if extended is None else extended.tolist()) == found


def test_released_memory_comes_back_under_the_same_tensors() -> None:
    memory = OPS.empty((6,), "float32")
    prefix = OPS.reshape(OPS.box(memory, Box((0,), (4,))), (2, 2))
    OPS.release(memory)
    assert memory.untyped_storage().nbytes() == 0
    OPS.restore(memory)
    memory.fill_(3.0)
    assert prefix.tolist() == [[3.0, 3.0], [3.0, 3.0]]
