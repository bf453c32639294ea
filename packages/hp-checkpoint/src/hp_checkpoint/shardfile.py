"""The layout of one data file: a safetensors header, then the tensors without gaps.

Pure: names, types and sizes in, header bytes and ranges out. Tensors of wider types come first, so
every one is aligned to its element. A piece that isn't the whole tensor carries its box in its name
(`model/w[0:4,0:8]`), so that no reader takes a shard for the tensor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_checkpoint.dtype import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hp_checkpoint.ports import Json
    from hp_mesh import Box

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a tensor that goes into a file."""

    name: str
    """The tensor's name."""
    rank: int | None
    """Set where the ranks' values differ: whose it is."""
    dtype: str
    """Name of the data type."""
    shape: tuple[int, ...]
    """Lengths of the full tensor's dims, in elements."""
    box: Box
    """Which part of the tensor."""

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return self.box.num_elements * DTYPES[self.dtype].itemsize

    @property
    def label(self) -> str:
        """What it is called in the file."""
        owner = "" if self.rank is None else f"[rank {self.rank}]"
        if self.box.sizes == self.shape:
            return self.name + owner
        bounds = zip(self.box.offsets, self.box.stops, strict=True)
        return f"{self.name}{owner}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where things lie in a file."""

    header: bytes
    """What the file starts with: length prefix and JSON, padded."""
    parts: tuple[Part, ...]
    """Its parts, in the order of their bytes."""
    ranges: tuple[tuple[int, int], ...]
    """First byte and first byte after it in the file, per part."""

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.ranges[-1][1] if self.ranges else len(self.header)


def lay_out(parts: Sequence[Part]) -> FileLayout:
    """Return where each part lies, and the header that says so.

    Args:
        parts: What goes into the file, in any order.

    Example:
        >>> from hp_mesh import Box
        >>> layout = lay_out([Part("w", None, "float32", (4, 2), Box((0, 0), (2, 2)))])
        >>> layout.parts[0].label, layout.num_bytes - len(layout.header)
        ('w[0:2,0:2]', 16)
    """
    ordered = sorted(parts, key=lambda part: (-DTYPES[part.dtype].itemsize, part.label))
    entries: dict[str, Json] = {"__metadata__": {"format": "hp-checkpoint"}}
    ends: list[int] = []
    position = 0
    for part in ordered:
        dtype = DTYPES[part.dtype]
        entries[part.label] = {
            "dtype": dtype.stored_as,
            "shape": [*part.box.sizes, *dtype.extra_dims],
            "data_offsets": [position, position + part.num_bytes],
        }
        position += part.num_bytes
        ends.append(position)
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts = [0, *ends[:-1]]
    ranges = zip(starts, ends, strict=True) if ends else ()
    base = len(header)
    return FileLayout(header, tuple(ordered), tuple((base + a, base + b) for a, b in ranges))
