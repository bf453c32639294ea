"""The transport of one rank: nothing is copied that needn't be, nothing is anybody else's."""

import numpy as np
import pytest

from hp_comm import CommError, CommTrace, plan_unit
from hp_comm.local import LocalCommunicator, LocalUnit
from hp_comm.plan import ParamSpec
from hp_comm.testing import NumpyOps
from hp_comm.testing.units import chunk_boxes


def open_unit(compute_dtype: str = "float32") -> LocalUnit:
    spec = ParamSpec("w", (4,), chunk_boxes((4,), 0, 1), "float32", compute_dtype, "float32")
    comm = LocalCommunicator("world", 0, NumpyOps())
    return comm.open_unit(plan_unit([spec], world_size=1), label="one")


def test_full_parameter_of_one_rank_is_its_shard() -> None:
    unit, shard = open_unit(), np.ones(4, np.float32)
    with CommTrace() as trace:
        unit.gather([shard])
        (full,) = unit.wait_gather()
    assert full is shard
    assert (trace.copied_bytes(), trace.wire_bytes()) == (0, 0)


def test_cast_parameter_is_the_same_array_in_every_cycle_and_counts_its_copy() -> None:
    unit, shard = open_unit("float16"), np.ones(4, np.float32)
    unit.gather([shard])
    (first,) = unit.wait_gather()
    unit.free()
    shard[:] = 2
    with CommTrace() as trace:
        unit.gather([shard])
        (second,) = unit.wait_gather()
    assert second is first
    assert second.tolist() == [2.0] * 4
    assert trace.copied_bytes("all_gather") == 4 * 2


def test_reduced_gradient_is_new_memory_and_scaled() -> None:
    unit, grad = open_unit("float16"), np.full(4, 3, np.float16)
    unit.reduce([grad], 0.5)
    (reduced,) = unit.wait_reduce()
    grad[:] = 0
    assert reduced.dtype == np.float32
    assert reduced.tolist() == [1.5] * 4


@pytest.mark.parametrize("value", ["text", bytearray(b"text"), memoryview(b"text"), None])
def test_value_that_is_no_bytes_is_refused(value: object) -> None:
    with pytest.raises(CommError, match=f"was given a {type(value).__name__}. Pass bytes"):
        LocalCommunicator("world", 0, NumpyOps()).all_gather_bytes(value)


def test_plan_for_more_ranks_is_refused() -> None:
    spec = ParamSpec("w", (4,), chunk_boxes((4,), 0, 2), "float32", "float32", "float32")
    plan = plan_unit([spec], world_size=2)
    with pytest.raises(
        CommError, match=r"'one' was planned for 2 ranks .* Plan it with world_size=1"
    ):
        LocalCommunicator("world", 0, NumpyOps()).open_unit(plan, label="one")
