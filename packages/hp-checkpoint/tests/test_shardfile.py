"""The files' layout, read by the safetensors library."""

from __future__ import annotations

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_checkpoint.dtype import DTYPES
from hp_checkpoint.shardfile import Part, lay_out
from hp_mesh import Box


def test_lay_out_of_a_shard_names_its_box() -> None:
    shard = Part("w", None, "float32", (4, 2), Box((2, 0), (2, 2)))
    whole = Part("b", 3, "float32", (4,), Box((0,), (4,)))

    assert [part.label for part in lay_out([shard, whole]).parts] == ["b[rank 3]", "w[2:4,0:2]"]


def test_lay_out_of_nothing_is_an_empty_file_of_safetensors() -> None:
    layout = lay_out([])

    assert safetensors.deserialize(layout.header) == []
    assert layout.num_bytes == len(layout.header)


@settings(deadline=None)  # other work on the machine is no fault
@given(
    st.dictionaries(
        st.text(max_size=5, alphabet=st.characters(exclude_categories=["Cs"])),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 3), max_size=3)),
        max_size=6,
    )
)
def test_lay_out_of_any_types_is_read_by_safetensors(
    tensors: dict[str, tuple[str, list[int]]],
) -> None:
    tensors.pop("__metadata__", None)
    parts = [
        Part(name, None, dtype, tuple(shape), Box((0,) * len(shape), tuple(shape)))
        for name, (dtype, shape) in tensors.items()
    ]
    layout = lay_out(parts)
    data = b"".join(bytes([i % 251]) * part.num_bytes for i, part in enumerate(layout.parts))

    found = dict(safetensors.deserialize(layout.header + data))

    assert set(found) == set(tensors)
    for i, (part, (begin, _)) in enumerate(zip(layout.parts, layout.ranges, strict=True)):
        assert found[part.name]["data"] == bytes([i % 251]) * part.num_bytes
        assert begin % min(DTYPES[part.dtype].itemsize, 8) == 0
