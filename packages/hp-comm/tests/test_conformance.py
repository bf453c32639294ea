"""The conformance suite on ranks that are threads: over memory, over shared memory, alone."""

from collections.abc import Callable

import pytest

from hp_comm._shm.kernel import why_unsupported
from hp_comm.local import LocalCommunicator
from hp_comm.ports import Communicator
from hp_comm.testing import NumpyOps, run_threads
from hp_comm.testing.conformance import BREAKING, CHECKS, check_all_reduce, check_communicator
from hp_comm.testing.shm import run_shm_threads
from hp_comm.testing.unit_conformance import check_unit_cycles

Check = Callable[[Communicator], None]
NAMES = [check.__name__ for check in CHECKS]
needs_shm = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_threads_conform(check: Check, world_size: int) -> None:
    run_threads(check, world_size)


def test_many_threads_conform() -> None:
    assert run_threads(check_communicator, 8) == [NAMES] * 8


@pytest.mark.parametrize("check", [check_all_reduce, check_unit_cycles])
def test_64_threads_conform(check: Check) -> None:
    run_threads(check, 64)


@pytest.mark.parametrize("check", BREAKING, ids=[check.__name__ for check in BREAKING])
@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_that_disagree_are_told(check: Check, world_size: int) -> None:
    run_threads(check, world_size)


@needs_shm
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shared_memory_conforms(world_size: int) -> None:
    assert run_shm_threads(check_communicator, world_size) == [NAMES] * world_size


@needs_shm
@pytest.mark.parametrize("check", BREAKING, ids=[check.__name__ for check in BREAKING])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_shared_memory_that_disagree_are_told(check: Check, world_size: int) -> None:
    run_shm_threads(check, world_size)


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_local_conforms(check: Check) -> None:
    check(LocalCommunicator("world", 0, NumpyOps()))


class WrongSum(LocalCommunicator):
    """Forgets to be right: its all_reduce changes the array."""

    def all_reduce(self, array, *, op="sum", async_op=False):
        work = super().all_reduce(array, op=op, async_op=async_op)
        self.ops.fill_zero(array)
        return work


def test_suite_notices_a_wrong_transport() -> None:
    with pytest.raises(AssertionError, match="all_reduce sum float32 1"):
        check_communicator(WrongSum("world", 0, NumpyOps()))


class SharedGradients(LocalCommunicator):
    """Gives the caller's gradients back instead of new memory."""

    def open_unit(self, plan, *, label):
        unit = super().open_unit(plan, label=label)
        unit._finish = lambda grad, dtype: grad
        return unit


def test_suite_notices_a_wrong_unit() -> None:
    with pytest.raises(AssertionError, match="reduced even in cycle 0"):
        check_unit_cycles(SharedGradients("world", 0, NumpyOps()))
