"""What goes wrong in torch's process groups comes home as an error of hp_comm that says where."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hp_comm
from hp_comm import CommError, CommTimeoutError, TransferError
from hp_comm._torch import choose
from hp_comm.testing import run_ranks


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Failed transfers

SCRIPT = """
    import os, signal, sys, threading, time
    import torch, torch.distributed as dist
    import hp_comm
    from hp_comm import TransferError

    rank = int(sys.argv[1])
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm = hp_comm.communicator(transport="gloo", timeout_s=40)
    comm.barrier()
    if rank == 1:  # posts that it has come, after a second, and dies
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(4)
    try:
        comm.all_reduce(torch.ones(1))
    except TransferError as error:
        print(error, flush=True)
        os._exit(5)
"""


def test_rank_that_dies_after_it_came_fails_the_transfer_by_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = processes[0].communicate(timeout=50)
        assert out.startswith("all_reduce number 2 of group 'world' failed: "), err
        assert processes[0].returncode == 5
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class FailedWork:
    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1.\nmore")

    def is_completed(self) -> bool:
        return True


def test_failed_wait_names_operation_group_and_number(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = hp_comm.communicator(transport="gloo")
    comm.barrier()
    monkeypatch.setattr(dist, "broadcast", lambda *args, **more: FailedWork())
    with pytest.raises(TransferError, match="broadcast number 2 of group 'world' failed") as caught:
        comm.broadcast(torch.ones(2))
    assert caught.value.reason == "[tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    assert isinstance(caught.value.__cause__, RuntimeError)


CALLS = {
    "all_gather_single": lambda comm: comm.all_gather_into(torch.empty(2), torch.ones(2)),
    "reduce_scatter_single": lambda comm: comm.reduce_scatter_into(torch.empty(2), torch.ones(2)),
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(2)),
    "broadcast": lambda comm: comm.broadcast(torch.ones(2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_that_torch_refuses_names_operation_group_and_number(
    name: str, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise RuntimeError("the group was aborted")

    comm = hp_comm.communicator(transport="gloo")
    monkeypatch.setattr(dist, name, refuse)
    text = f"{name.removesuffix('_single')} number 1 of group 'world' failed: the group was aborted"
    with pytest.raises(TransferError, match=text):
        CALLS[name](comm)


def test_store_that_is_gone_is_named(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class GoneStore:
        def add(self, key: str, number: int) -> int:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", GoneStore)
    with pytest.raises(CommError, match=r"the store of the job can't be reached .*reset by peer"):
        hp_comm.communicator(transport="gloo")


# Tensors that can't be moved


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        pytest.param(
            torch.ones(3, device="meta"), "'cpu' and was given one on 'meta'", id="another device"
        ),
        pytest.param(torch.ones(3, dtype=torch.complex64).conj(), "a lazy conjugate", id="conj"),
        pytest.param(torch.ones(3).to_sparse(), "isn't contiguous", id="sparse"),
    ],
)
def test_tensor_that_can_not_be_moved_is_refused_and_not_counted(
    tensor: torch.Tensor, text: str, world_of_one: None
) -> None:
    comm = hp_comm.communicator(transport="gloo")
    with hp_comm.CommTrace() as trace, pytest.raises(CommError, match=text):
        comm.all_reduce(tensor)
    assert trace.events == ()
    assert comm.sequence == 0


def reduce_complex(rank: int, world_size: int) -> list[complex]:
    comm = hp_comm.communicator(transport="gloo")
    array, part = torch.tensor([1 + 2j, rank + 0j]), torch.empty(1, dtype=torch.complex64)
    comm.reduce_scatter_into(part, array.clone())
    comm.all_reduce(array, op="avg")
    with pytest.raises(CommError, match="'prod' of complex64 was asked for and gloo has none"):
        comm.all_reduce(array, op="prod")
    return [*array.tolist(), *part.tolist()]


def test_gloo_adds_complex_numbers() -> None:
    first, second = run_ranks(reduce_complex, 2)
    assert first == [1 + 2j, 0.5, 2 + 4j]
    assert second == [1 + 2j, 0.5, 1]


def gather_text(rank: int, world_size: int) -> list[bytes]:
    comm = hp_comm.communicator(transport="gloo")
    if rank == 0:  # alone, so that nothing may have been sent
        with pytest.raises(CommError, match=r"was given a str. Pass bytes"):
            comm.all_gather_bytes("text")
    return comm.all_gather_bytes(b"%d" % rank)


def test_value_that_is_no_bytes_is_refused_before_anything_is_sent() -> None:
    assert run_ranks(gather_text, 2) == [[b"0", b"1"]] * 2


# Time-outs that are none


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_barrier_with_a_time_out_that_is_none_is_refused(
    timeout_s: float, world_of_one: None
) -> None:
    comm = hp_comm.communicator(transport="gloo")
    with pytest.raises(CommError, match="Pass a finite number above 0"):
        comm.barrier(timeout_s=timeout_s)
    assert comm.sequence == 0


def wait_for_a_moment(rank: int, world_size: int) -> bool:
    comm = hp_comm.communicator(transport="gloo", timeout_s=30)
    if rank:
        time.sleep(2.0)
        comm.barrier()
        return True
    work = comm.all_reduce(torch.zeros(1), async_op=True)  # meets the other's barrier
    with pytest.raises(CommTimeoutError):
        work.wait(0.0001)  # torch takes less than a millisecond as "for ever"
    has_waited = not work.is_completed()
    work.wait()
    return has_waited


def test_time_out_below_a_millisecond_is_short_and_the_wait_can_go_on() -> None:
    assert run_ranks(wait_for_a_moment, 2) == [True, True]


# Groups that are gone, ranks that aren't in them


def test_destroyed_group_has_no_communicator(world_of_one: None) -> None:
    group = dist.new_group([0])
    dist.destroy_process_group(group)
    with pytest.raises(CommError, match=r"which was destroyed. Make another one"):
        hp_comm.communicator(group)


def ask_as_a_stranger(rank: int, world_size: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return hp_comm.communicator(group).transport
    with pytest.raises(CommError, match=r"in which this rank isn't.* Ask on its members only"):
        hp_comm.communicator(group)
    return "refused"


def test_rank_outside_a_group_is_refused() -> None:
    assert run_ranks(ask_as_a_stranger, 2) == ["local", "refused"]


# Threads


def ask_on_threads(rank: int, world_size: int, transport: str) -> tuple[int, float]:
    made = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        made.append(hp_comm.communicator(transport=transport))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    array = torch.ones(1)
    made[0].all_reduce(array)
    return len(made), len({id(comm) for comm in made}) * array.item()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_threads_that_ask_at_once_get_one_communicator(transport: str) -> None:
    assert run_ranks(ask_on_threads, 2, transport) == [(4, 2.0)] * 2


def test_one_communicator_is_made_though_making_it_takes_long(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = choose.C10dCommunicator

    def make_slowly(*args: object, **more: object) -> object:
        time.sleep(0.2)
        return make(*args, **more)

    monkeypatch.setattr(choose, "C10dCommunicator", make_slowly)
    assert ask_on_threads(0, 1, "gloo") == (4, 1.0)
