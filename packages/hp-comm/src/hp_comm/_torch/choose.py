"""Which transport serves a group, and the communicators made so far.

    group                                     transport
    one rank                                  local
    cpu, all ranks on one host                shm
    anything else                             the process group's backend (gloo, nccl, hccl)

Communicators are kept per ranks and transport, as long as the default process group lives.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from hp_comm import _shm
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

    default: object = None
    communicators: dict[Key, Communicator] = field(default_factory=dict)
    num_attempts: dict[Key, int] = field(default_factory=dict)
    has_warned: bool = False


_made = _Made()


def communicator(
    group: object | None = None, *, transport: str = "auto", timeout_s: float | None = None
) -> Communicator:
    """Return the communicator of a group; see `hp_comm.communicator`."""
    wanted = choose_transport(transport)
    limit_s = choose_timeout(timeout_s)
    if not dist.is_initialized():
        raise CommError(
            "a communicator was asked for and torch.distributed isn't initialised. Start the "
            "script with torchrun and call torch.distributed.init_process_group first."
        )
    _forget_stale()
    process_group, name, device = _resolve(group)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    key = (ranks, wanted, device)
    if key not in _made.communicators:
        facts = GroupFacts(
            name, ranks, ranks.index(dist.get_rank()), _backend(process_group, device), device
        )
        _made.communicators[key] = _make(process_group, facts, wanted, limit_s)
    return _made.communicators[key]


def _forget_stale() -> None:
    default = dist.group.WORLD
    if _made.default is not default:
        for old in _made.communicators.values():
            old.close()
        _made.default = default
        _made.communicators = {}
        _made.num_attempts = {}


def _resolve(group: object | None) -> tuple[dist.ProcessGroup, str, str]:
    """Return the process group, its name and the device type whose tensors it moves."""
    if group is None:
        found = cast("dist.ProcessGroup", dist.group.WORLD)
        return found, "world", _device(found)
    if isinstance(group, dist.ProcessGroup):
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


def _make(
    group: dist.ProcessGroup, facts: GroupFacts, wanted: Transport, timeout_s: float
) -> Communicator:
    rendezvous = StoreRendezvous(dist.distributed_c10d._get_default_store())
    ops = TorchOps(facts.device)
    if len(facts.ranks) == 1 and wanted != "shm":
        return LocalCommunicator(facts.name, facts.ranks[0], ops)
    if wanted == "shm" or (wanted == "auto" and facts.device == "cpu"):
        try:
            return _shm.connect(
                name=facts.name,
                ranks=facts.ranks,
                index=facts.index,
                rendezvous=rendezvous,
                ops=ops,
                timeout_s=timeout_s,
                key=_next_key(facts),
            )
        except TransportError as error:
            if wanted == "shm":
                raise
            _warn_once(facts, error)
    return C10dCommunicator(group, facts, rendezvous=rendezvous, timeout_s=timeout_s)


def _next_key(facts: GroupFacts) -> str:
    """Return a name in the store that no earlier attempt of these ranks used."""
    key = (facts.ranks, "shm", facts.device)
    number = _made.num_attempts.get(key, 0)
    _made.num_attempts[key] = number + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ranks = "-".join(map(str, facts.ranks))
    return f"hp-comm/shm/{restart}/{ranks}/{number}"


def _warn_once(facts: GroupFacts, error: TransportError) -> None:
    if not _made.has_warned and facts.index == 0:
        _made.has_warned = True
        text = f"group {facts.name!r} uses {facts.backend} instead of shared memory: {error}"
        LOGGER.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
