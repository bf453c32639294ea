"""One unit on torch: its modules, its parameters, its settings and its channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, cast

import hp_comm
from hp_comm.plan import ParamSpec, itemsize, plan_unit
from hp_fully_shard._torch.binding import TorchBinding
from hp_fully_shard.errors import ShardedStateError, UnsupportedError
from hp_fully_shard.executor import ExecutedUnit
from hp_fully_shard.scheduler import UnitSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hp_comm.ports import UnitChannel
    from hp_fully_shard._torch.param import ShardedParam
    from hp_fully_shard._torch.tree import Tree
    from hp_fully_shard.policy import MixedPrecisionPolicy
    from hp_mesh import DeviceMesh


@dataclass(slots=True)
class Place:
    """A unit's seat in a tree."""

    tree: Tree
    number: int


@dataclass(eq=False)
class TorchUnit:
    """Parameters that are gathered together, and the modules whose calls need them."""

    modules: tuple[nn.Module, ...]
    """The modules that `fully_shard` was given in one call."""

    params: list[ShardedParam]
    """What the unit holds; may be empty."""

    mesh: DeviceMesh
    """The 1-D mesh over whose ranks the parameters are sharded."""

    policy: MixedPrecisionPolicy
    """Data types of compute, reduction and outputs."""

    reshard_after_forward: bool | None
    """As the user asked; None: yes, except for the root of a tree."""

    settings: UnitSettings = field(default_factory=UnitSettings)
    """What the scheduler reads at every event."""

    forward_prefetch: list[TorchUnit] = field(default_factory=list)
    """Units to gather when this one's forward starts."""

    backward_prefetch: list[TorchUnit] | None = None
    """Units to gather when this one's backward starts; None: the one that ran before it."""

    divide_factor: float | None = None
    """What summed gradients are divided by; None: the number of ranks."""

    place: Place | None = None
    """The tree it belongs to; None before the first forward."""

    label: str = ""
    """Name of its first module inside the tree's root."""

    def __post_init__(self) -> None:
        reduce = self.policy.reduce_dtype
        self.binding = TorchBinding(self.params, cast("torch.dtype | None", reduce))
        self.executed = ExecutedUnit(label="", channel=None, binding=self.binding)
        self.settings.num_members = len(self.modules)
        self.settings.empty = not self.params
        self._signature: tuple[object, ...] = ()
        for param in self.params:
            param.on_grad = self._on_grad

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse: a channel to other ranks can't be copied."""
        name = self.label or type(self.modules[0]).__name__
        raise UnsupportedError(
            f"copy.deepcopy of a sharded module (unit {name!r}) isn't supported. Copy the module "
            f"before fully_shard, or load its state dict into another sharded module."
        )

    def _on_grad(self) -> None:
        if self.place is not None:
            self.place.tree.gradient_arrived(self.place.number)

    def prepare(self, label: str) -> None:
        """Name the unit and open its channel if it has none that fits; collective."""
        self.label = self.executed.label = label
        self.settings.trainable = any(param.sharded.requires_grad for param in self.params)
        factor = self.divide_factor or float(self.mesh.size())
        self.executed.factor = 1.0 / factor
        signature = tuple(param.signature for param in self.params)
        if not self.params or (self.executed.channel and signature == self._signature):
            return
        self._refuse_meta()
        self.close()
        specs = self._specs()
        plan = plan_unit(specs, world_size=self.mesh.size())
        communicator = hp_comm.communicator(self.mesh)
        self.executed.channel = communicator.open_unit(plan, label=label)
        self.executed.full_bytes = sum(_full_bytes(spec) for spec in specs)
        self._signature = signature

    @property
    def is_prepared(self) -> bool:
        """Whether the open channel still fits the parameters."""
        return self._signature == tuple(param.signature for param in self.params)

    @property
    def channel(self) -> UnitChannel | None:
        """The open channel, if any."""
        return self.executed.channel

    def close(self) -> None:
        """Close the channel, if any; the next forward opens another."""
        if self.executed.channel is not None:
            self.executed.channel.close()
        self.executed.channel = None
        self._signature = ()

    def _specs(self) -> list[ParamSpec]:
        compute = cast("torch.dtype | None", self.policy.param_dtype)
        reduce = cast("torch.dtype | None", self.policy.reduce_dtype)
        return [param.spec(compute, reduce) for param in self.params]

    def _refuse_meta(self) -> None:
        names = [param.name for param in self.params if param.sharded.is_meta]
        if names:
            raise ShardedStateError(
                f"parameters {names} of unit {self.label!r} are on the meta device, so there is "
                f"nothing to gather. Call model.to_empty(device={self.mesh.device_type!r}) and "
                f"then initialise or load them."
            )


def _full_bytes(spec: ParamSpec) -> int:
    elements = 1
    for size in spec.shape:
        elements *= size
    return elements * itemsize(spec.compute_dtype)
