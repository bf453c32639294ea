"""Which transport serves a group, and the communicators made so far.

    group                                     transport
    one rank                                  local
    cpu, all ranks on one host                shm
    anything else                             the process group's backend (gloo, nccl, hccl)

Communicators are kept per ranks and transport, or per process group where that moves the bytes,
for as long as the default process group lives. Threads may ask at the same time: those that ask for
the same ranks wait for each other, those that ask for others don't, since that could be a deadlock.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from hp_comm._torch.c10d import C10dCommunicator, GroupFacts
from hp_comm._torch.ops import TorchOps
from hp_comm._torch.store import StoreRendezvous
from hp_comm.errors import CommError, TransportError
from hp_comm.local import LocalCommunicator
from hp_comm.settings import Transport, choose_timeout, choose_transport
from hp_mesh import DeviceMesh, as_device_mesh

if TYPE_CHECKING:
    from hp_comm.ports import Communicator

LOGGER = logging.getLogger("hyper_parallel.COMM")
DEVICES = {"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}
Key = tuple[tuple[int, ...], str, str]


@dataclass
class _Made:
    """Communicators of one default process group."""

    default: weakref.ref[dist.ProcessGroup] | None = None
    by_ranks: dict[Key, Communicator] = field(default_factory=dict)
    declined: set[Key] = field(default_factory=set)
    locks: dict[tuple[int, ...], threading.Lock] = field(default_factory=dict)
    by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, C10dCommunicator] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    answers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, str], Communicator]] = (
        field(default_factory=weakref.WeakKeyDictionary)
    )


_made = _Made()
_made_lock = threading.Lock()
_warned: list[str] = []


def communicator(
    group: object | None = None, *, transport: str = "auto", timeout_s: float | None = None
) -> Communicator:
    """Return the communicator of a group; see `hp_comm.communicator`."""
    wanted = choose_transport(transport)
    limit_s = None if timeout_s is None else choose_timeout(timeout_s)
    if not dist.is_initialized():
        raise CommError(
            "a communicator was asked for and torch.distributed isn't initialised. Start the "
            "script with torchrun and call torch.distributed.init_process_group first."
        )
    made = _forget_stale()
    process_group, name, device = _resolve(group)
    answers = made.answers.setdefault(process_group, {})
    answer = answers.get((wanted, device))
    if answer is None:
        facts = _facts(process_group, name, device)
        limit_s = limit_s or choose_timeout(None)
        with made.locks.setdefault(facts.ranks, threading.Lock()):
            answer = _ours(made, facts, wanted, limit_s)
            if answer is None:
                answer = _torchs(made, process_group, facts, limit_s)
            answers[wanted, device] = answer
    return answer


def _ours(made: _Made, facts: GroupFacts, wanted: Transport, limit_s: float) -> Communicator | None:
    """Return the communicator of these ranks that needs no process group, or None."""
    key = (facts.ranks, wanted, facts.device)
    if key not in made.by_ranks and key not in made.declined:
        found = _make(facts, wanted, limit_s)
        if found is None:
            made.declined.add(key)
        else:
            made.by_ranks[key] = found
            made.by_ranks[facts.ranks, found.transport, facts.device] = found
    return made.by_ranks.get(key)


def _torchs(
    made: _Made, group: dist.ProcessGroup, facts: GroupFacts, limit_s: float
) -> Communicator:
    if group not in made.by_group:
        store = StoreRendezvous(dist.distributed_c10d._get_default_store())
        key = _next_key(store, facts, f"progress/{group.group_name}")
        made.by_group[group] = C10dCommunicator(
            group, facts, store=store, key=key, timeout_s=limit_s
        )
    return made.by_group[group]


def _forget_stale() -> _Made:
    """Return what was made for the default process group of now; drop what was for another."""
    global _made  # noqa: PLW0603  # one registry, replaced as a whole
    default = cast("dist.ProcessGroup", dist.group.WORLD)
    with _made_lock:
        if _made.default is None or _made.default() is not default:
            for old in _made.by_ranks.values():
                old.close()
            _made = _Made(default=weakref.ref(default))
        return _made


def _facts(group: dist.ProcessGroup, name: str, device: str) -> GroupFacts:
    ranks, own = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
    if own not in ranks:
        raise CommError(
            f"rank {own} asked for a communicator of group {name!r} of ranks {ranks}, in which it "
            f"isn't. Ask on its members only."
        )
    return GroupFacts(name, ranks, ranks.index(own), _backend(group, device), device)


def _resolve(group: object | None) -> tuple[dist.ProcessGroup, str, str]:
    """Return the process group, its name and the device type whose tensors it moves."""
    if group is None:
        found = cast("dist.ProcessGroup", dist.group.WORLD)
        return found, "world", _device(found)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise CommError(
            "a communicator was asked for of a group in which this rank isn't: new_group returned "
            "GroupMember.NON_GROUP_MEMBER. Ask on its members only."
        )
    if isinstance(group, dist.ProcessGroup):
        if group not in dist.distributed_c10d._world.pg_map:
            raise CommError(
                f"a communicator was asked for of process group {group.group_name!r}, which was "
                f"destroyed. Make another one with torch.distributed.new_group."
            )
        return group, group.group_desc or group.group_name, _device(group)
    if isinstance(group, tuple) and len(group) == 2:  # noqa: PLR2004  # (mesh, axis)
        mesh, axis = as_device_mesh(group[0]), group[1]
        name = mesh.axis_names[mesh.axis_index(axis)]
        return cast("dist.ProcessGroup", mesh.get_group(axis)), name, mesh.device_type
    mesh = as_device_mesh(group)
    if mesh.ndim != 1:
        raise CommError(
            f"a communicator was asked for on a mesh of axes {mesh.axis_names}. Pass "
            f"(mesh, axis), or a mesh of one axis."
        )
    return cast("dist.ProcessGroup", mesh.get_group()), _mesh_name(mesh), mesh.device_type


def _mesh_name(mesh: DeviceMesh) -> str:
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "world"


def _device(group: dist.ProcessGroup) -> str:
    return DEVICES.get(dist.get_backend(group), "cpu")


def _backend(group: dist.ProcessGroup, device: str) -> str:
    backend = dist.get_backend(group)
    if backend in DEVICES or ":" not in dist.get_backend_config(group):
        return backend
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return pairs.get(device, backend)


def _make(facts: GroupFacts, wanted: Transport, timeout_s: float) -> Communicator | None:
    """Return a communicator that needs no process group, or None where that has to serve."""
    ops = TorchOps(facts.device)
    if wanted in DEVICES:
        if wanted != facts.backend:
            raise TransportError(
                f"transport {wanted!r} was asked for and the process group of {facts.name!r} has "
                f"{facts.backend!r} for {facts.device}. Make the group with it, or pass 'auto'."
            )
        return None
    if wanted == "auto" and len(facts.ranks) == 1:
        return LocalCommunicator(facts.name, facts.ranks[0], ops)
    if facts.device != "cpu":
        if wanted == "shm":
            raise TransportError(
                f"transport 'shm' was asked for and group {facts.name!r} moves tensors of device "
                f"{facts.device!r}. Pass 'auto', or a group of CPU tensors."
            )
        return None
    return _connect(facts, wanted, timeout_s)


def _connect(facts: GroupFacts, wanted: Transport, timeout_s: float) -> Communicator | None:
    store = StoreRendezvous(dist.distributed_c10d._get_default_store())
    shm = importlib.import_module("hp_comm._shm")
    try:
        made: Communicator = shm.connect(
            name=facts.name,
            ranks=facts.ranks,
            index=facts.index,
            rendezvous=store,
            ops=TorchOps(facts.device),
            timeout_s=timeout_s,
            key=_next_key(store, facts),
        )
    except TransportError as error:
        if wanted == "shm":
            raise
        _warn_once(facts, error)
        return None
    LOGGER.debug("group %r of ranks %s uses shared memory", facts.name, facts.ranks)
    return made


def _next_key(store: StoreRendezvous, facts: GroupFacts, purpose: str = "shm") -> str:
    """Return a name in the store that no earlier attempt of these ranks used for this purpose.

    The store may outlive process groups and processes, so it counts: every rank of an attempt
    adds one, and no rank gets to the next attempt before all have.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks = "-".join(map(str, facts.ranks))
    prefix = f"hp-comm/{purpose}/{restart}/{ranks}"
    attempt = (store.count_up(f"{prefix}/joined") - 1) // len(facts.ranks)
    return f"{prefix}/{attempt}"


def _warn_once(facts: GroupFacts, error: TransportError) -> None:
    if _warned or facts.index != 0:
        return
    text = f"group {facts.name!r} uses {facts.backend} instead of shared memory: {error}"
    _warned.append(text)
    # The frames above: _connect, _make, _ours, communicator here, two in api.py.
    warnings.warn(text, RuntimeWarning, stacklevel=8)
