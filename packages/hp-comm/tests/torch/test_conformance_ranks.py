"""The conformance suite on real processes with torch: over gloo, over shared memory."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

import hp_comm
from hp_comm._shm.kernel import why_unsupported
from hp_comm._torch import TorchOps
from hp_comm.local import LocalCommunicator
from hp_comm.testing import conformance, run_ranks
from hp_comm.testing.conformance import CHECKS, check_communicator

NAMES = [check.__name__ for check in CHECKS]
needs_shm = pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported()))


def conform(rank: int, world_size: int, transport: str) -> tuple[str, list[str]]:
    comm = hp_comm.communicator(transport=transport)
    return comm.transport, check_communicator(comm)


def conform_in_part(rank: int, world_size: int, transport: str, members: list[int]) -> list[str]:
    """Run the suite on some of the ranks, in another order than theirs in the world."""
    group = dist.new_group(members, group_desc="part")
    if rank not in members:
        return []
    comm = hp_comm.communicator(group, transport=transport)
    assert comm.name == "part"
    assert comm.ranks == tuple(members)
    return check_communicator(comm)


def break_group(rank: int, world_size: int, transport: str, name: str) -> None:
    found = [check for check in conformance.BREAKING if check.__name__ == name]
    found[0](hp_comm.communicator(transport=transport))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=needs_shm)])
def test_processes_conform(transport: str, world_size: int) -> None:
    assert run_ranks(conform, world_size, transport) == [(transport, NAMES)] * world_size


@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=needs_shm)])
def test_part_of_the_ranks_conforms(transport: str) -> None:
    assert run_ranks(conform_in_part, 3, transport, [0, 2]) == [NAMES, [], NAMES]


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        ("gloo", "check_time_out"),
        ("gloo", "check_different_plans"),
        pytest.param("shm", "check_time_out", marks=needs_shm),
        pytest.param("shm", "check_different_calls", marks=needs_shm),
        pytest.param("shm", "check_different_plans", marks=needs_shm),
    ],
)
def test_processes_that_disagree_are_told(transport: str, name: str) -> None:
    run_ranks(break_group, 3, transport, name)


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_local_conforms_with_torch(check: Callable[[LocalCommunicator], None]) -> None:
    check(LocalCommunicator("world", 0, TorchOps("cpu")))
