"""Imported once by the fork server, so that every rank starts with torch already loaded."""

import contextlib
import importlib
import os
import warnings

# A library that starts threads when it is imported must not do so before the server forks.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "hp_comm.testing.child",
    "hp_comm._torch",
    "hp_comm._torch.join",
    "hp_dtensor",
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
