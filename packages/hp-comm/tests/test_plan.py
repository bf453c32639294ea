"""What travels alone, what is packed, and that padded shards concatenate to the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_comm import CommError, ParamSpec, plan_unit
from hp_comm.plan import BUCKET_BELOW_BYTES, is_chunked, itemsize, padded_shard_elements
from hp_comm.testing.units import chunk_boxes
from hp_mesh import Box

F32 = ("float32", "float32", "float32")


def chunked(shape: tuple[int, ...], num_ranks: int, dim: int = 0, name: str = "w") -> ParamSpec:
    return ParamSpec(name, shape, chunk_boxes(shape, dim, num_ranks), *F32)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [("bool", 1), ("float8_e4m3fn", 1), ("bfloat16", 2), ("float32", 4), ("complex128", 16)],
)
def test_itemsize_of_known_dtype(dtype: str, num_bytes: int) -> None:
    assert itemsize(dtype) == num_bytes


def test_itemsize_of_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(CommError, match=r"'float7' isn't known. Pass one of \('bool'"):
        itemsize("float7")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(chunked((8, 3), 4), True, id="even"),
        pytest.param(chunked((9, 3), 4), True, id="uneven"),
        pytest.param(chunked((2, 3), 4), True, id="empty shards"),
        pytest.param(chunked((0, 3), 4), True, id="no element"),
        pytest.param(chunked((8, 4), 4, dim=1), False, id="along dim 1"),
        pytest.param(chunked((1, 4), 2, dim=1), False, id="one row along dim 1"),
        pytest.param(ParamSpec("s", (), (Box((), ()),), *F32), True, id="scalar on one rank"),
        pytest.param(
            ParamSpec("r", (4,), (Box((2,), (2,)), Box((0,), (2,))), *F32), False, id="reversed"
        ),
        pytest.param(
            ParamSpec("b", (5,), (Box((0,), (2,)), Box((2,), (3,))), *F32), False, id="not ceil"
        ),
    ],
)
def test_is_chunked_needs_ceil_chunks_of_dim_0_in_order(spec: ParamSpec, expected: bool) -> None:
    assert is_chunked(spec) is expected


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param((4,), (Box((0,), (3,)),), id="gap"),
        pytest.param((4,), (Box((0,), (2,)), Box((1,), (2,))), id="overlap beside a gap"),
        pytest.param((4,), (Box((0,), (4,)), Box((0,), (4,))), id="twice"),
        pytest.param((4,), (Box((1,), (4,)),), id="outside"),
        pytest.param((4,), (Box((0, 0), (4, 1)),), id="another number of dims"),
        pytest.param((2, 2), (Box((0, 0), (2, 1)), Box((0, 0), (1, 2))), id="crossing"),
    ],
)
def test_spec_with_boxes_that_do_not_tile_is_refused(
    shape: tuple[int, ...], boxes: tuple[Box, ...]
) -> None:
    with pytest.raises(CommError, match=r"of parameter 'layers.0.w' hold .* cover it exactly once"):
        ParamSpec("layers.0.w", shape, boxes, *F32)


def test_spec_with_unknown_dtype_is_refused() -> None:
    with pytest.raises(CommError, match="'int7' isn't known"):
        ParamSpec("w", (1,), (Box((0,), (1,)),), "float32", "float32", "int7")


def test_spec_counts_elements_and_bytes() -> None:
    boxes = chunk_boxes((3, 5), 0, 2)
    spec = ParamSpec("w", (3, 5), boxes, "float32", "bfloat16", "float64")
    assert (spec.num_elements, spec.full_bytes, spec.reduce_bytes) == (15, 30, 120)
    assert padded_shard_elements(spec) == 10


def test_plan_sends_big_chunked_parameters_alone_and_packs_the_rest() -> None:
    rows = BUCKET_BELOW_BYTES // 4 // 8
    params = [
        chunked((rows, 8), 2, name="at the threshold"),
        chunked((rows - 1, 8), 2, name="below it"),
        chunked((rows, 8), 2, dim=1, name="along dim 1"),
    ]
    plan = plan_unit(params, world_size=2)
    assert plan.direct == (0,)
    assert plan.buckets == ((1, 2),)
    assert plan.full_bytes == 4 * 8 * (3 * rows - 1)


def test_plan_packs_by_storage_compute_and_reduce_dtype() -> None:
    boxes = chunk_boxes((4,), 0, 2)
    dtypes = [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ]
    params = [ParamSpec(str(i), (4,), boxes, *names) for i, names in enumerate(dtypes)]
    assert plan_unit(params, world_size=2).buckets == ((0, 2), (1,), (3,), (4,))


def test_plan_with_missing_boxes_names_the_parameter() -> None:
    with pytest.raises(CommError, match="parameter 'norm' has 2 boxes for a group of 3 ranks"):
        plan_unit([chunked((3,), 3), chunked((4,), 2, name="norm")], world_size=3)


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    num_ranks=st.integers(1, 9),
)
def test_padded_shards_of_direct_parameter_concatenate_to_it(
    shape: tuple[int, ...], num_ranks: int
) -> None:
    spec = chunked(shape, num_ranks)
    plan = plan_unit([spec], world_size=num_ranks, bucket_below_bytes=0)
    assert plan.direct == (0,)
    full = np.arange(1, spec.num_elements + 1).reshape(shape)
    length = padded_shard_elements(spec)
    shards = [np.zeros(length, int) for _ in spec.boxes]
    for shard, box in zip(shards, spec.boxes, strict=True):
        shard[: box.num_elements] = full[box.slices()].reshape(-1)
    joined = np.concatenate(shards)
    np.testing.assert_array_equal(joined[: full.size], full.reshape(-1))
    assert not joined[full.size :].any()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=12),
    num_ranks=st.integers(1, 5),
    threshold=st.integers(0, 200),
)
def test_every_parameter_travels_once(
    sizes: list[tuple[int, int]], num_ranks: int, threshold: int
) -> None:
    params = [chunked(shape, num_ranks, dim=i % 2) for i, shape in enumerate(sizes)]
    plan = plan_unit(params, world_size=num_ranks, bucket_below_bytes=threshold)
    travelling = [*plan.direct, *(index for bucket in plan.buckets for index in bucket)]
    assert sorted(travelling) == list(range(len(params)))


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    cuts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_moving_one_box_of_a_grid_is_noticed(
    shape: tuple[int, int], cuts: tuple[int, int], data: st.DataObject
) -> None:
    rows, columns = (chunk_boxes((size,), 0, n) for size, n in zip(shape, cuts, strict=True))
    boxes = [Box(r.offsets + c.offsets, r.sizes + c.sizes) for r in rows for c in columns]
    ParamSpec("w", shape, tuple(boxes), *F32)  # a grid is accepted
    filled = [i for i, box in enumerate(boxes) if box.num_elements]
    moved = data.draw(st.sampled_from(filled))
    places = [
        (row, column)
        for row in range(shape[0] - boxes[moved].sizes[0] + 1)
        for column in range(shape[1] - boxes[moved].sizes[1] + 1)
        if (row, column) != boxes[moved].offsets
    ]
    if not places:
        return
    boxes[moved] = Box(data.draw(st.sampled_from(places)), boxes[moved].sizes)
    covered = np.zeros(shape, int)
    for box in boxes:
        covered[box.slices()] += 1
    assert not (covered == 1).all()
    with pytest.raises(CommError, match="cover it exactly once"):
        ParamSpec("w", shape, tuple(boxes), *F32)
