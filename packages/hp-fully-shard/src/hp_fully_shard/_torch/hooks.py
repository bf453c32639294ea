"""Turns the calls and gradients of one module into the scheduler's four events.

    event             comes from
    before_forward    a forward pre-hook of the module
    after_forward     a forward hook of the module
    before_backward   a hook on the gradients of its outputs, whichever arrives first
    after_backward    a hook on the gradients of its inputs, when all have arrived
    backward_end      the autograd engine's callback (see tree.py)

Note [inputs are views]: the inputs that need a gradient are replaced by plain views of
themselves. The gradient of such a view is complete when every use *inside* the module has added
to it, whatever else the caller does with the input. A view made by an ordinary operation may be
changed in place where the input may; an autograd function that returns its input may not.

Note [outputs that are views]: an in-place change of a view replaces its history by one that goes
through its base. So the base's history gets a hook as well.

Source: identity node on inputs and gradient hooks on outputs, as in PyTorch FSDP2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from hp_fully_shard._torch.structure import map_tensors, tensors_in
from hp_fully_shard._torch.tree import Tree, inside_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hp_fully_shard._torch.unit import Place, TorchUnit
    from hp_fully_shard.actions import Action

Inputs = TypeVar("Inputs")
Args = tuple[object, ...]
Kwargs = dict[str, object]


class CallHooks:
    """The hooks of one unit on one of its modules.

    Args:
        unit: The unit whose parameters the module's calls need.
        member: Index of the module in a list unit; None for a unit of one module.
    """

    def __init__(self, unit: TorchUnit, member: int | None) -> None:
        self._unit = unit
        self._member = member

    def attach(self, module: nn.Module, *, first: bool) -> None:
        """Register the hooks.

        Args:
            module: Whose calls are watched.
            first: Run before every other forward pre-hook. So it is for the module's own unit;
                units that it shares a tied weight with come after that one.
        """
        module.register_forward_pre_hook(self._before_forward, prepend=first, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def _before_forward(
        self, module: nn.Module, args: Args, kwargs: Kwargs
    ) -> tuple[Args, Kwargs] | None:
        inside = inside_backward()
        place = self._unit.place
        if place is None:
            tree = Tree(module)
            place = cast("Place", self._unit.place)
        else:
            tree = place.tree
            if not inside:
                tree.refresh(place.number)
        scheduler = tree.scheduler
        tree.run(
            scheduler.before_forward(place.number, member=self._member, inside_backward=inside)
        )
        inputs = (args, kwargs)
        policy = self._unit.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            inputs = cast_floating(inputs, cast("torch.dtype", policy.param_dtype))
        if torch.is_grad_enabled():
            inputs = self._watch_inputs(inputs)
        return inputs

    def _after_forward(self, module: nn.Module, args: Args, output: object) -> object:
        place = cast("Place", self._unit.place)
        awaits = torch.is_grad_enabled() and self._watch_outputs(output)
        actions = place.tree.scheduler.after_forward(
            place.number,
            awaits_backward=awaits,
            member=self._member,
            inside_backward=inside_backward(),
        )
        place.tree.run(actions)
        if self._unit.policy.output_dtype is not None:
            return cast_floating(output, cast("torch.dtype", self._unit.policy.output_dtype))
        return output

    def _watch_inputs(self, inputs: tuple[Args, Kwargs]) -> tuple[Args, Kwargs]:
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            views.append(tensor.view_as(tensor))  # see Note [inputs are views]
            return views[-1]

        inputs = map_tensors(view, inputs)
        _call_when_all(views, self._on_input_grads)
        return inputs

    def _watch_outputs(self, output: object) -> bool:
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        _call_on_first(outputs, self._on_output_grad)
        for tensor in outputs:
            base = tensor._base  # see Note [outputs that are views]
            if base is not None and base.grad_fn is not None:
                base.grad_fn.register_prehook(self._on_base_grad)
        return bool(outputs)

    def _on_output_grad(self) -> None:
        self._run(lambda tree, number: tree.scheduler.before_backward(number))

    def _on_base_grad(self, grads: object) -> None:
        """Act only while a call is awaited: the base may be older than the unit's call."""
        place = cast("Place", self._unit.place)
        if place.tree.scheduler.awaits_backward(place.number):
            self._on_output_grad()

    def _on_input_grads(self) -> None:
        self._run(lambda tree, number: tree.scheduler.after_backward(number))

    def _run(self, event: Callable[[Tree, int], list[Action]]) -> None:
        place = cast("Place", self._unit.place)
        place.tree.run(event(place.tree, place.number))


def cast_floating(value: Inputs, dtype: torch.dtype) -> Inputs:
    """Return a structure with every floating-point tensor cast to a data type.

    Args:
        value: Any structure of tensors.
        dtype: The floating-point type wanted.

    Example:
        >>> cast_floating([torch.ones(1), torch.tensor(1)], torch.float64)
        [tensor([1.], dtype=torch.float64), tensor(1)]
    """
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def _call_when_all(tensors: Sequence[torch.Tensor], function: Callable[[], None]) -> None:
    if len(tensors) == 1:  # the general hook costs more
        tensors[0].register_hook(lambda grad: function())
    elif tensors:
        register_multi_grad_hook(tensors, lambda grads: function(), mode="all")


def _call_on_first(tensors: Sequence[torch.Tensor], function: Callable[[], None]) -> None:
    if len(tensors) == 1:
        tensors[0].register_hook(lambda grad: function())
    elif tensors:
        register_multi_grad_hook(tensors, lambda grad: function(), mode="any")
