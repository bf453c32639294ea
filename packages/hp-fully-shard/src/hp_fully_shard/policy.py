"""In which data types a unit computes, reduces and returns its outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Data types of a unit; None keeps the parameters' own.

    Field names and meanings are those of PyTorch FSDP2's class of the same name. The types are
    the framework's own objects (`torch.bfloat16`).

    Example:
        >>> MixedPrecisionPolicy().cast_forward_inputs
        True
    """

    param_dtype: object | None = None
    """Type of the full parameters during compute; shards stay as they are."""

    reduce_dtype: object | None = None
    """Type in which gradients are accumulated and added over the ranks; None: `param_dtype`."""

    output_dtype: object | None = None
    """Type to which floating-point outputs of the unit's modules are cast."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of the unit's modules to `param_dtype`."""
