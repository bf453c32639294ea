"""What tests of distributed code need: ranks as threads, ranks as processes, a common suite."""

from hp_comm.testing.conformance import check_communicator
from hp_comm.testing.numpy_ops import NumpyOps
from hp_comm.testing.processes import RankError, run_ranks
from hp_comm.testing.threads import ThreadCommunicator, run_threads

__all__ = [
    "NumpyOps",
    "RankError",
    "ThreadCommunicator",
    "check_communicator",
    "run_ranks",
    "run_threads",
]
