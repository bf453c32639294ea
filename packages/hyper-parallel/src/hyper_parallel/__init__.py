"""hyper_parallel: train models that do not fit one device. The front door to the hp-* packages.

Names are looked up in the package that owns them when they are first used, so importing this
imports no framework and next to nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hyper_parallel._version import __version__

if TYPE_CHECKING:
    from hp_checkpoint import (
        load,
        load_full,
        load_optimizer_state,
        optimizer_state,
        read_metadata,
        save,
        verify,
    )
    from hp_comm import (
        CommDebugMode,
        CommTrace,
        all_gather_into,
        all_reduce,
        barrier,
        broadcast,
        communicator,
        reduce_scatter_into,
    )
    from hp_dtensor import (
        Layout,
        Placement,
        Replicate,
        Shard,
        box_of,
        distribute_tensor,
        dtensor_from_local,
        layout_of,
        local_of,
    )
    from hp_fully_shard import HSDPModule, MixedPrecisionPolicy, fully_shard
    from hp_mesh import AbstractMesh, Box, DeviceMesh, init_device_mesh, use_framework

__all__ = [
    "AbstractMesh",
    "Box",
    "CommDebugMode",
    "CommTrace",
    "DeviceMesh",
    "HSDPModule",
    "Layout",
    "MixedPrecisionPolicy",
    "Placement",
    "Replicate",
    "Shard",
    "__version__",
    "all_gather_into",
    "all_reduce",
    "barrier",
    "box_of",
    "broadcast",
    "communicator",
    "distribute_tensor",
    "dtensor_from_local",
    "fully_shard",
    "init_device_mesh",
    "layout_of",
    "load",
    "load_full",
    "load_optimizer_state",
    "local_of",
    "optimizer_state",
    "read_metadata",
    "reduce_scatter_into",
    "save",
    "use_framework",
    "verify",
]

_OWNERS = {
    "AbstractMesh": "hp_mesh",
    "Box": "hp_mesh",
    "CommDebugMode": "hp_comm",
    "CommTrace": "hp_comm",
    "DeviceMesh": "hp_mesh",
    "HSDPModule": "hp_fully_shard",
    "Layout": "hp_dtensor",
    "MixedPrecisionPolicy": "hp_fully_shard",
    "Placement": "hp_dtensor",
    "Replicate": "hp_dtensor",
    "Shard": "hp_dtensor",
    "all_gather_into": "hp_comm",
    "all_reduce": "hp_comm",
    "barrier": "hp_comm",
    "box_of": "hp_dtensor",
    "broadcast": "hp_comm",
    "communicator": "hp_comm",
    "distribute_tensor": "hp_dtensor",
    "dtensor_from_local": "hp_dtensor",
    "fully_shard": "hp_fully_shard",
    "init_device_mesh": "hp_mesh",
    "layout_of": "hp_dtensor",
    "load": "hp_checkpoint",
    "load_full": "hp_checkpoint",
    "load_optimizer_state": "hp_checkpoint",
    "local_of": "hp_dtensor",
    "optimizer_state": "hp_checkpoint",
    "read_metadata": "hp_checkpoint",
    "reduce_scatter_into": "hp_comm",
    "save": "hp_checkpoint",
    "use_framework": "hp_mesh",
    "verify": "hp_checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _OWNERS:
        raise AttributeError(
            f"module 'hyper_parallel' has no attribute {name!r}. It re-exports "
            f"{', '.join(sorted(_OWNERS))}; look for anything else in the hp_* packages."
        )
    value: object = getattr(importlib.import_module(_OWNERS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_OWNERS))
