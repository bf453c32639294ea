"""The torch adapter: process groups of torch.distributed, and torch's own DeviceMesh."""

from hp_mesh._torch.convert import as_ours, is_torch_mesh, make_torch_mesh
from hp_mesh._torch.runtime import RUNTIME

__all__ = ["RUNTIME", "as_ours", "is_torch_mesh", "make_torch_mesh"]
