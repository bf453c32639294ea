"""Shared memory between the ranks of one host; framework-free."""

from hp_comm._shm.formation import connect

__all__ = ["connect"]
