"""hp_comm: collectives without needless copies, and exact counts of what they move."""

from hp_comm._version import __version__
from hp_comm.api import (
    all_gather_into,
    all_reduce,
    barrier,
    broadcast,
    communicator,
    reduce_scatter_into,
)
from hp_comm.errors import (
    CommError,
    CommTimeoutError,
    MismatchError,
    TransferError,
    TransportError,
)
from hp_comm.plan import ParamSpec, UnitPlan, plan_unit
from hp_comm.ports import Array, ArrayOps, Communicator, ReduceOp, UnitChannel, Work
from hp_comm.trace import CommDebugMode, CommEvent, CommTrace

__all__ = [
    "Array",
    "ArrayOps",
    "CommDebugMode",
    "CommError",
    "CommEvent",
    "CommTimeoutError",
    "CommTrace",
    "Communicator",
    "MismatchError",
    "ParamSpec",
    "ReduceOp",
    "TransferError",
    "TransportError",
    "UnitChannel",
    "UnitPlan",
    "Work",
    "__version__",
    "all_gather_into",
    "all_reduce",
    "barrier",
    "broadcast",
    "communicator",
    "plan_unit",
    "reduce_scatter_into",
]
