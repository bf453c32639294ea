"""The demo on PyTorch; see `hyper_parallel.demo.ports.Engine`."""

from hyper_parallel._torch.demo_launch import run_phase
from hyper_parallel._torch.demo_sample import versions, write_sample

__all__ = ["run_phase", "versions", "write_sample"]
