"""Shared memory between real processes: overload, silence, death, and what stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hp_comm._shm import connect, formation, kernel
from hp_comm._shm.handover import Handover
from hp_comm.errors import CommTimeoutError, MismatchError
from hp_comm.plan import UnitPlan
from hp_comm.testing import NumpyOps, RankError, run_ranks
from hp_comm.testing.folder import FolderRendezvous
from hp_comm.testing.units import chunked_plan

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)
SHAPE = (10, 3)


def join(rank, world_size, folder, timeout_s=20.0):
    return connect(
        name="dp",
        ranks=tuple(range(world_size)),
        index=rank,
        rendezvous=FolderRendezvous(folder),
        ops=NumpyOps(),
        timeout_s=timeout_s,
        key="group",
    )


def plan(world_size: int, dim: int) -> UnitPlan:
    return chunked_plan(world_size, [(SHAPE, dim)])


def full(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=SHAPE).astype(np.float32)


def train(rank, world_size, folder, dim):
    """Gather, change in place, reduce; return how many steps were right."""
    comm = join(rank, world_size, folder)
    made = plan(world_size, dim)
    units = [comm.open_unit(made, label=f"layers.{i}") for i in range(2)]
    own = made.params[0].boxes[rank].slices()
    num_right = 0
    for step in range(40):
        unit = units[step % 2]
        unit.gather([full(step)[own]])
        (found,) = unit.wait_gather()
        is_right = np.array_equal(found, full(step))
        found *= rank + 2
        unit.free()
        unit.reduce([full(step) * (rank + 1)], 1.0)
        (total,) = unit.wait_reduce()
        expected = full(step)[own] * sum(range(1, world_size + 1))
        num_right += is_right and np.allclose(total, expected, rtol=1e-5)
    comm.barrier()
    comm.close()
    return num_right


@pytest.mark.parametrize(("world_size", "dim"), [(2, 0), (3, 1), (4, 0), (4, 1)])
def test_units_on_real_processes_gather_and_reduce_right(tmp_path, world_size, dim):
    assert run_ranks(train, world_size, str(tmp_path), dim) == [40] * world_size


def meet_often(rank, world_size, folder, num_times):
    comm = join(rank, world_size, folder)
    start = time.monotonic()
    for _ in range(num_times):
        comm.barrier()
    elapsed_s = time.monotonic() - start
    comm.close()
    return elapsed_s


def test_more_ranks_than_cpus_beside_busy_loops_still_make_headway(tmp_path):
    loop = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(loop) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        elapsed_s = max(run_ranks(meet_often, 4, str(tmp_path), 300))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    # One sleep of 0.1 s per barrier, as if nobody were ever woken, would take 30 s.
    assert elapsed_s < 15


def in_dev_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("tmp", "hyper", "hp"))}


def is_listening(folder: Path) -> bool:
    """Tell whether the socket that was offered still has an end in some process."""
    offer = json.loads(FolderRendezvous(folder).wait_for("group/offer", timeout_s=1))
    return offer["address"] in Path("/proc/net/unix").read_text(encoding="utf-8")


def die(rank, world_size, folder, victim, where):
    """Kill one rank in the middle of something; the others write what they see."""
    if where == "connect" and rank == victim:
        name = "give" if victim == 0 else "take"
        setattr(Handover, name, lambda *_args: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        comm = join(rank, world_size, folder, timeout_s=2.0 if where == "connect" else 20.0)
        unit = comm.open_unit(plan(world_size, 0), label="layers.0")
        for step in range(1000):
            start = time.monotonic()
            if step == 100 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            work(comm, unit, step, where)
    except CommTimeoutError as error:
        note = {"missing": error.missing, "text": str(error), "s": time.monotonic() - start}
        Path(folder, f"saw-{rank}").write_text(json.dumps(note), encoding="utf-8")


def work(comm, unit, step, where):
    if where == "collective":
        comm.all_reduce(np.ones(5))
    elif where == "gather":
        own = unit.plan.params[0].boxes[comm.index].slices()
        unit.gather([full(step)[own]])
        unit.wait_gather()
        unit.free()
    else:
        unit.reduce([full(step)], 1.0)
        unit.wait_reduce()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["collective", "gather", "reduce", "connect"])
def test_killed_rank_is_named_by_the_survivors_and_nothing_stays(tmp_path, victim, where):
    files = in_dev_shm()
    with pytest.raises(RankError, match=f"rank {victim} was ended by SIGKILL"):
        run_ranks(die, 3, str(tmp_path), victim, where, grace_s=20.0)
    for rank in {0, 1, 2} - {victim}:
        saw = json.loads(Path(tmp_path, f"saw-{rank}").read_text(encoding="utf-8"))
        assert saw["missing"] == [victim]
        assert f"rank {victim} did not arrive" in saw["text"]
        assert saw["s"] < 15
    assert in_dev_shm() <= files
    assert not is_listening(tmp_path)


def stop_and_go(rank, world_size, folder):
    """Rank 1 stands still inside a wait; the others must not take that for a mismatch."""
    comm = join(rank, world_size, folder, timeout_s=20.0)
    unit = comm.open_unit(plan(world_size, 0), label="layers.0")
    pids = [int(raw) for raw in comm.all_gather_bytes(str(os.getpid()).encode())]
    own = unit.plan.params[0].boxes[rank].slices()
    if rank == 1:
        unit.gather([full(0)[own]])
        unit.wait_gather()
        comm.barrier()
        return "done"
    if rank == 0:
        time.sleep(0.6)  # rank 1 waits for the gather by now
        os.kill(pids[1], signal.SIGSTOP)
    unit.gather([full(0)[own]])
    unit.wait_gather()
    if rank == 0:
        subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {pids[1]}"])
    comm.barrier()
    return "done"


def test_rank_that_stands_still_for_a_while_is_waited_for(tmp_path):
    assert run_ranks(stop_and_go, 3, str(tmp_path)) == ["done"] * 3


def see_other_call(rank, world_size, folder):
    comm = join(rank, world_size, folder)
    try:
        comm.barrier() if rank else comm.all_reduce(np.ones(3))
    except MismatchError as error:
        return str(error)
    return ""


def test_processes_at_different_calls_learn_who_is_at_which(tmp_path):
    for text in run_ranks(see_other_call, 2, str(tmp_path)):
        assert "rank 0: all_reduce sum 3 float64; rank 1: barrier" in text


def guess_token(rank, world_size, folder):
    if rank == 1:
        knock = formation.knock
        formation.knock = lambda address, _token, *rest: knock(address, b"guess", *rest)
    try:
        join(rank, world_size, folder, timeout_s=1.0)
    except CommTimeoutError as error:
        return error.missing
    return ()


def test_process_with_a_wrong_token_gets_no_memory(tmp_path):
    missed_by_leader, seen_by_stranger = run_ranks(guess_token, 2, str(tmp_path))
    assert missed_by_leader == (1,)
    assert seen_by_stranger  # it timed out as well
