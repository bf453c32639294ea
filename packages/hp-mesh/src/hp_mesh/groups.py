"""Which process groups exist, and in which order a mesh makes them.

Note [one order for all groups]: a framework makes a group when all its members ask for it. Ranks
that ask for the groups of two axes in different order wait for each other for ever. So the first
touch of any axis makes this rank's groups of *all* axes of the root mesh, in axis order; the
groups of one axis share no rank, so no cycle can arise. Flattened axes come in the order in which
they were flattened: who asks for the group of one makes those of the earlier ones first.

The registry lives as long as the default process group: after destroy and initialise again it
starts empty.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, cast

from hp_mesh._framework import FRAMEWORKS, current_framework, load_adapter
from hp_mesh.errors import MeshStateError

if TYPE_CHECKING:
    from hp_mesh.ports import GroupRuntime

Ranks = tuple[int, ...]
RANK_VARIABLE = "RANK"


class GroupRegistry:
    """Process groups by their ranks, for one default process group at a time."""

    def __init__(self) -> None:
        self._default: object = None
        self._groups: dict[Ranks, object] = {}

    def get(self, runtime: GroupRuntime, ranks: Ranks) -> object:
        """Return the group of these ranks; every member must call this in the same order."""
        default = runtime.default_group()
        if default is not self._default:
            self._default = default
            self._groups = {tuple(range(runtime.world_size())): default}
        if ranks not in self._groups:
            self._groups[ranks] = runtime.new_group(ranks)
        return self._groups[ranks]


REGISTRY = GroupRegistry()


def runtime() -> GroupRuntime:
    """Return the process groups of the framework in use."""
    return cast("GroupRuntime", load_adapter("hp_mesh", current_framework()).RUNTIME)


def started_runtime(device_type: str) -> GroupRuntime:
    """Return the process groups; the default one is made if it isn't there.

    Raises:
        MeshStateError: It isn't, and the launcher's environment variables aren't set.
    """
    groups = runtime()
    if not groups.is_initialized():
        groups.initialize(device_type)
    return groups


def own_rank() -> int:
    """Return this process's global rank, from the process group or the launcher's environment.

    Raises:
        MeshStateError: Neither says.
    """
    if any(name in sys.modules for name in FRAMEWORKS):
        groups = runtime()
        if groups.is_initialized():
            return groups.rank()
    value = os.environ.get(RANK_VARIABLE, "")
    if not value.isdigit():
        raise MeshStateError(
            "this process's rank isn't known: there is no default process group, and the "
            f"environment variable {RANK_VARIABLE} is {value!r}. Start the script with torchrun, "
            "or initialise the process group first."
        )
    return int(value)
