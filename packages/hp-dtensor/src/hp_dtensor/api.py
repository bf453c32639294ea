"""The functions that touch a framework's tensors; each hands over to its adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_dtensor.errors import LayoutError
from hp_mesh._framework import current_framework, framework_of, load_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from hp_dtensor.layout import Layout
    from hp_dtensor.placement import Placement
    from hp_mesh import Box


def _adapter(value: object) -> ModuleType:
    return load_adapter("hp_dtensor", framework_of(value) or current_framework())


def _adapter_of_dtensor(value: object) -> ModuleType:
    framework = framework_of(value)
    adapter = load_adapter("hp_dtensor", framework) if framework is not None else None
    if adapter is None or not adapter.is_dtensor(value):
        raise LayoutError(
            f"a DTensor was expected and a {type(value).__name__} was found. Make one with "
            f"distribute_tensor or dtensor_from_local."
        )
    return adapter


def is_dtensor(value: object) -> bool:
    """Tell whether the object is the framework's distributed tensor.

    Example:
        >>> is_dtensor(3)
        False
    """
    framework = framework_of(value)
    return framework is not None and bool(_adapter(value).is_dtensor(value))


def dtensor_from_local(
    local: Any,  # noqa: ANN401  # the framework's tensor
    mesh: object,
    placements: Sequence[object],
    *,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> Any:  # noqa: ANN401  # the framework's DTensor
    """Return a DTensor over this rank's piece, without communication and without a copy.

    Args:
        local: What this rank holds; its shape is that of its box.
        mesh: Our mesh or the framework's.
        placements: One per mesh axis, ours or the framework's.
        shape: Of the whole tensor.
        stride: Of the whole tensor, in elements; None: contiguous.

    Raises:
        LayoutError: The piece hasn't the shape that the layout gives this rank, or placements or
            strides don't fit.
        PlacementError: A placement of torch has no counterpart here.
    """
    return _adapter(local).dtensor_from_local(local, mesh, placements, shape=shape, stride=stride)


def distribute_tensor(
    full: Any,  # noqa: ANN401  # the framework's tensor
    mesh: object,
    placements: Sequence[object],
) -> Any:  # noqa: ANN401  # the framework's DTensor
    """Cut this rank's piece out of a tensor that every rank holds, without communication.

    Args:
        full: The whole tensor, the same on every rank.
        mesh: Our mesh or the framework's.
        placements: One per mesh axis, ours or the framework's.

    Raises:
        LayoutError: The placements don't fit the mesh or the tensor.
        PlacementError: A placement of torch has no counterpart here.
    """
    return _adapter(full).distribute_tensor(full, mesh, placements)


def layout_of(dtensor: object) -> Layout:
    """Return the mesh and placements of a DTensor.

    Raises:
        LayoutError: It isn't a DTensor.
        PlacementError: It has a placement without counterpart here.
    """
    layout: Layout = _adapter_of_dtensor(dtensor).layout_of(dtensor)
    return layout


def local_of(dtensor: Any) -> Any:  # noqa: ANN401  # the framework's tensors
    """Return this rank's piece of a DTensor: the very memory, outside autograd.

    Raises:
        LayoutError: It isn't a DTensor.
    """
    return _adapter_of_dtensor(dtensor).local_of(dtensor)


def box_of(dtensor: Any) -> Box:  # noqa: ANN401  # the framework's DTensor
    """Return which part of the whole tensor this rank's piece is.

    Raises:
        LayoutError: It isn't a DTensor.
        PlacementError: It has a placement without counterpart here.
    """
    return layout_of(dtensor).local_box(tuple(dtensor.shape))


def to_torch_placement(placement: Placement) -> object:
    """Return torch's placement for ours.

    Raises:
        LayoutError: It isn't one of ours.
    """
    return load_adapter("hp_dtensor", "torch").to_torch_placement(placement)


def from_torch_placement(placement: object) -> Placement | None:
    """Return our placement for torch's; None where it isn't a placement of torch.

    Raises:
        PlacementError: It is one that has no counterpart in this version.
    """
    found: Placement | None = load_adapter("hp_dtensor", "torch").from_torch_placement(placement)
    return found
