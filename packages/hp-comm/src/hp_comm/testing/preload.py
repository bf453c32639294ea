"""Imported once by the fork server, so that every rank starts with torch already loaded."""

import contextlib
import importlib

for _name in ("torch", "torch.distributed", "torch.distributed.tensor", "hp_comm", "hp_dtensor"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
