"""Communicators over torch's process groups: choice, cache, time-outs, deaths."""

import os
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hp_comm
from hp_comm import CommError, CommTimeoutError, CommTrace, MismatchError, TransportError
from hp_comm._torch import choose
from hp_comm.testing import run_ranks
from hp_comm.testing.units import chunked_plan
from hp_mesh import init_device_mesh


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Which transport


def choose_auto(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    asked = [None, (mesh, "dp"), (mesh, 0), mesh["dp"], dist.group.WORLD, (mesh, "tp")]
    made = [hp_comm.communicator(group) for group in asked]
    assert made[0] is made[4], "the world's communicator was made twice"
    assert made[1] is made[2] is made[3], "an axis's communicator was made twice"
    return [comm.transport for comm in made]


def test_auto_picks_shared_memory_and_nothing_for_one_rank() -> None:
    shm = "shm"
    assert run_ranks(choose_auto, 2) == [[shm, shm, shm, shm, shm, "local"]] * 2


def choose_by_environment(rank: int, world_size: int) -> tuple[str, str, str]:
    first, second = hp_comm.communicator(), hp_comm.communicator(transport="shm")
    return first.transport, second.transport, hp_comm.communicator().transport


def test_environment_replaces_auto_only() -> None:
    found = run_ranks(choose_by_environment, 2, env={"HP_TRANSPORT": "gloo"})
    assert found == [("gloo", "shm", "gloo")] * 2


def test_unknown_transport_in_environment_is_refused(
    world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_TRANSPORT", "pigeon")
    with pytest.raises(CommError, match=r"'pigeon' isn't known. Pass one of \('auto', 'shm'"):
        hp_comm.communicator()


def test_transport_that_the_group_lacks_is_refused(world_of_one: None) -> None:
    with pytest.raises(TransportError, match=r"'nccl' was asked for .* has 'gloo' for cpu"):
        hp_comm.communicator(transport="nccl")


def test_wrong_time_out_is_refused_also_later(world_of_one: None) -> None:
    hp_comm.communicator()
    with pytest.raises(CommError, match="a time-out of -1 s"):
        hp_comm.communicator(timeout_s=-1)


def test_communicator_without_process_group_is_refused() -> None:
    with pytest.raises(CommError, match="isn't initialised"):
        hp_comm.communicator()


def test_mesh_of_two_axes_is_refused(world_of_one: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(CommError, match=r"axes \('dp', 'tp'\). Pass \(mesh, axis\)"):
        hp_comm.communicator(mesh)


def refuse_shared_memory(rank: int, world_size: int) -> tuple[str, list[str], str]:
    if rank == 1:
        from hp_comm._shm import formation  # noqa: PLC0415  # only this rank lacks it

        formation.why_unsupported = lambda: "this kernel is from a museum"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = hp_comm.communicator()
        hp_comm.communicator(dist.new_group([0, 1]))
        assert hp_comm.communicator() is first
    try:
        hp_comm.communicator(transport="shm")
    except TransportError as error:
        refusal = str(error)
    return first.transport, [f"{one.filename}: {one.message}" for one in caught], refusal


def test_fallback_warns_once_with_the_reason_where_it_was_asked_for() -> None:
    first, second = run_ranks(refuse_shared_memory, 2)
    assert first[0] == second[0] == "gloo"
    assert "group 'world' uses gloo instead of shared memory" in first[1][0]
    assert "this kernel is from a museum" in first[1][0]
    assert first[1][0].startswith(__file__)
    assert (len(first[1]), len(second[1])) == (1, 0)
    assert "museum" in first[2]
    assert "museum" in second[2]


# The cache


def make_again(rank: int, world_size: int, num_times: int) -> list[float]:
    """Make and destroy the default group again and again, over one store."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    sums = []
    for number in range(num_times):
        prefix = dist.PrefixStore(f"again{number % 2}/{number}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
        for transport in ("shm", "gloo"):
            array = torch.tensor([float(number)])
            hp_comm.communicator(transport=transport).all_reduce(array)
            sums.append(array.item())
        dist.destroy_process_group()
    num_open = len(os.listdir("/proc/self/fd"))
    assert num_open < 100, f"{num_open} descriptors are open"
    return sums


def test_groups_are_made_and_destroyed_again_and_again_in_one_process() -> None:
    expected = [2.0 * number for number in range(8) for _ in ("shm", "gloo")]
    assert run_ranks(make_again, 2, 8) == [expected, expected]


def count_attempts(rank: int, world_size: int) -> list[str]:
    """Ask for keys of one store again, as after destroy and init over torchrun's store."""
    store = choose.StoreRendezvous(dist.distributed_c10d._get_default_store())
    facts = choose.GroupFacts("dp", (0, 1), rank, "gloo", "cpu")
    keys = []
    for _ in range(3):
        keys.append(choose._next_key(store, facts))
        dist.barrier()
    return keys


def test_keys_in_a_store_that_lives_on_are_never_used_again() -> None:
    first, second = run_ranks(count_attempts, 2)
    assert first == second
    assert len(set(first)) == 3


def test_communicator_of_destroyed_group_says_so(world_of_one: None) -> None:
    comm = hp_comm.communicator(transport="gloo")
    dist.destroy_process_group()
    with pytest.raises(CommError, match="used after its process group was destroyed"):
        comm.all_reduce(torch.ones(1))


def test_new_group_gets_a_new_communicator(world_of_one: None) -> None:
    comm = hp_comm.communicator(transport="gloo")
    assert hp_comm.communicator(transport="gloo") is comm
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert hp_comm.communicator(transport="gloo") is not comm


# Functions


def use_functions(rank: int, world_size: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    output = torch.empty(2 * world_size)
    hp_comm.all_gather_into(output, torch.full((2,), float(rank)), mesh)
    part = torch.empty(2)
    work = hp_comm.reduce_scatter_into(part, output, (mesh, "dp"), op="avg", async_op=True)
    work.wait()
    array = torch.tensor([rank + 1], dtype=torch.int16)
    with CommTrace() as trace:
        hp_comm.all_reduce(array, op="max")
        hp_comm.barrier()
    table = torch.full((2, 2), rank)
    hp_comm.broadcast(table, source=1)
    return {
        "gathered": output.tolist(),
        "part": part.tolist(),
        "max": array.item(),
        "table": table.tolist(),
        "counts": trace.counts(),
    }


def test_functions_move_torch_tensors() -> None:
    for rank, found in enumerate(run_ranks(use_functions, 2)):
        assert found == {
            "gathered": [0.0, 0.0, 1.0, 1.0],
            "part": [float(rank)] * 2,
            "max": 2,
            "table": [[1, 1], [1, 1]],
            "counts": {"all_reduce": 1, "barrier": 1},
        }


def test_function_on_no_tensor_is_refused() -> None:
    with pytest.raises(CommError, match="asked for on a list, which is no tensor of"):
        hp_comm.all_reduce([1.0])


def move_odd_dtypes(rank: int, world_size: int, names: list[str]) -> list[bool]:
    comm = hp_comm.communicator(transport="gloo")
    found = []
    for name in names:
        parts = [torch.tensor([r, 1, 2]).to(getattr(torch, name)) for r in range(world_size)]
        output = torch.empty(6, dtype=parts[0].dtype)
        comm.all_gather_into(output, parts[rank])
        found.append(output.float().tolist() == torch.cat(parts).float().tolist())
        comm.broadcast(parts[rank], source=1)
        found.append(parts[rank].float().tolist() == [1.0, 1.0, 2.0])
        with pytest.raises(CommError, match=f"'sum' of {name} was asked for and gloo has none"):
            comm.all_reduce(output)
    return found


def test_gloo_moves_types_that_it_can_not_reduce() -> None:
    names = ["int16", "uint16", "uint32", "uint64", "float8_e4m3fn"]
    assert run_ranks(move_odd_dtypes, 2, names) == [[True] * 10] * 2


# Time-outs and deaths


def arrive_late(rank: int, world_size: int, delays_s: list[float]) -> list[int]:
    comm = hp_comm.communicator(transport="gloo", timeout_s=4.0)
    comm.barrier()
    time.sleep(delays_s[rank])
    if rank == world_size - 1:
        return []
    text = "all_reduce number 2 of group 'world' waited 4.0 s and rank 2 did not arrive"
    with pytest.raises(CommTimeoutError, match=text) as caught:
        comm.all_reduce(torch.ones(1))
    return list(caught.value.missing)


def test_time_out_names_who_is_missing_not_who_came_late() -> None:
    assert run_ranks(arrive_late, 3, [0.0, 2.0, 0.0]) == [[2], [2], []]


def call_differently(rank: int, world_size: int) -> str:
    comm = hp_comm.communicator(transport="gloo", timeout_s=1.0)
    array = torch.ones(4)
    if rank == 0:
        work = comm.broadcast(array, source=1, async_op=True)
    else:
        work = comm.all_gather_into(torch.empty(8), array, async_op=True)
    with pytest.raises((MismatchError, CommTimeoutError)) as caught:
        work.wait()
    return str(caught.value)


def test_different_calls_over_gloo_are_named() -> None:
    texts = run_ranks(call_differently, 2)
    assert any("in broadcast" in text and "in all_gather" in text for text in texts), texts


SCRIPT = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    import hp_comm
    from hp_comm import CommTimeoutError

    rank, size = int(sys.argv[1]), 3
    store = dist.FileStore(sys.argv[2], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = hp_comm.communicator(transport="gloo", timeout_s=float(sys.argv[4]))
    comm.barrier()
    if rank == 2:
        if sys.argv[3] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    try:
        comm.all_reduce(torch.ones(1))
    except CommTimeoutError as error:
        print(f"missing {error.missing}", flush=True)
        if sys.argv[3] == "die":
            os._exit(5)
        dist.destroy_process_group()
"""


def start_script(folder: Path, how: str, timeout_s: float) -> list[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store"), how, str(timeout_s)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("how", "timeout_s", "code"), [("die", 25.0, 5), ("hang", 1.0, 1)], ids=["die", "hang"]
)
def test_rank_that_is_gone_is_named_and_the_others_end(
    how: str, timeout_s: float, code: int, tmp_path: Path
) -> None:
    processes = start_script(tmp_path, how, timeout_s)
    try:
        for process in processes[:2]:
            out, err = process.communicate(timeout=50)
            assert out.strip() == "missing (2,)", err
            assert process.returncode == code
            assert ("never ended: leaving with exit code 1" in err) == (how == "hang")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# Units


def give_up_a_gather(rank: int, world_size: int) -> list[float]:
    """Free a gather that still runs: torch must not write into memory that was given back."""
    comm = hp_comm.communicator(transport="gloo")
    plan = chunked_plan(world_size, [((2 * world_size, 65536), 0)])
    unit = comm.open_unit(plan, label="big")
    shard = torch.full((2, 65536), float(rank))
    for _ in range(5):
        unit.gather([shard])
        unit.free()
    unit.gather([shard])
    (full,) = unit.wait_gather()
    found = full[::2, 0].tolist()
    num_bytes = full.untyped_storage().nbytes()
    unit.free()
    assert num_bytes == full.numel() * 4
    assert full.untyped_storage().nbytes() == 0
    return found


def test_gather_given_up_leaves_memory_alone_and_free_gives_it_back() -> None:
    assert run_ranks(give_up_a_gather, 2) == [[0.0, 1.0]] * 2


def train_units_in_bfloat16(rank: int, world_size: int) -> dict[str, object]:
    comm = hp_comm.communicator(transport="gloo")
    plan = chunked_plan(
        world_size, [((5, 3), 0), ((3, 4), 1)], compute_dtype="bfloat16", reduce_dtype="float32"
    )
    unit = comm.open_unit(plan, label="half")
    full = [torch.arange(15.0).view(5, 3), torch.arange(12.0).view(3, 4)]
    boxes = [spec.boxes[rank] for spec in plan.params]
    unit.gather([f[box.slices()] for f, box in zip(full, boxes, strict=True)])
    found = unit.wait_gather()
    unit.reduce([f.to(torch.bfloat16) for f in full], 1.0 / world_size)
    reduced = unit.wait_reduce()
    return {
        "dtypes": [str(array.dtype) for array in (*found, *reduced)],
        "full": all(torch.equal(a.float(), b) for a, b in zip(found, full, strict=True)),
        "own": all(
            torch.equal(a, b[box.slices()]) for a, b, box in zip(reduced, full, boxes, strict=True)
        ),
    }


def test_unit_computes_in_bfloat16_and_reduces_in_float32() -> None:
    wanted = {
        "dtypes": ["torch.bfloat16"] * 2 + ["torch.float32"] * 2,
        "full": True,
        "own": True,
    }
    assert run_ranks(train_units_in_bfloat16, 3) == [wanted] * 3
