"""The data types that can be stored, and how a safetensors file calls them.

Names are torch's without the prefix. What safetensors has no name for is stored as bytes or as
pairs of real numbers with one more dim, and the manifest keeps the true name:

    stored as               data types
    their own               bool, uint8-64, int8-64, float16-64, bfloat16, float8_e4m3fn, _e5m2
    pairs, dim of 2 added   complex32 (F16), complex64 (F32), complex128 (F64)
    U8                      every other type of one byte
"""

from __future__ import annotations

from dataclasses import dataclass

_OWN = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
}
_PAIRS = {"complex32": ("F16", 4), "complex64": ("F32", 8), "complex128": ("F64", 16)}
_BYTES = (
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
)
_CARRIERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, slots=True)
class Dtype:
    """One data type."""

    name: str
    """torch's name without the prefix."""
    itemsize: int
    """Bytes of an element."""
    stored_as: str
    """The name in the header of a safetensors file."""
    extra_dims: tuple[int, ...]
    """Dims added in the file: `(2,)` for complex numbers."""

    @property
    def carrier(self) -> str:
        """Numpy's name of the type that carries the bits."""
        return _CARRIERS[self.itemsize]


DTYPES: dict[str, Dtype] = {
    **{name: Dtype(name, size, tag, ()) for name, (tag, size) in _OWN.items()},
    **{name: Dtype(name, size, tag, (2,)) for name, (tag, size) in _PAIRS.items()},
    **{name: Dtype(name, 1, "U8", ()) for name in _BYTES},
    "bits16": Dtype("bits16", 2, "U16", ()),
}
"""Every data type by name."""
