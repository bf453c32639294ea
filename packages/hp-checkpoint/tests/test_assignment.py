"""Who writes what."""

from __future__ import annotations

import pytest

from hp_checkpoint.assignment import SPLIT_BYTES, SavedValue, TensorOffer, ValueOffer, assign
from hp_checkpoint.errors import StateError
from hp_checkpoint.tiling import fault
from hp_mesh import Box, shard_bounds

PATH = (("dict", "w"),)


def part(length: int, start: int, size: int, digest: str | None = None) -> TensorOffer:
    return TensorOffer(PATH, "uint8", (length,), Box((start,), (size,)), digest)


def test_assign_of_equal_values_keeps_one() -> None:
    found = assign([[ValueOffer(PATH, 1)], [ValueOffer(PATH, 1)]])

    assert found.leaves == (SavedValue(PATH, 1, None),)


def test_assign_of_equal_values_with_other_types_keeps_each() -> None:
    found = assign([[ValueOffer(PATH, 1)], [ValueOffer(PATH, 1.0)]])

    assert found.leaves == (SavedValue(PATH, 1, 0), SavedValue(PATH, 1.0, 1))


def test_assign_of_a_value_on_one_rank_keeps_it_for_all() -> None:
    found = assign([[], [ValueOffer(PATH, 1)]])

    assert found.leaves == (SavedValue(PATH, 1, None),)


def test_assign_of_shards_gives_each_rank_its_own() -> None:
    found = assign([[part(5, 0, 3)], [part(5, 3, 2)], [part(5, 5, 0)]])

    assert [[one.label for one in own] for own in found.parts] == [["w[0:3]"], ["w[3:5]"], []]


def test_assign_of_equal_ordinary_tensors_writes_one() -> None:
    found = assign([[part(5, 0, 5, "same")], [part(5, 0, 5, "same")]])

    assert [len(own) for own in found.parts] == [1, 0]


def test_assign_of_differing_ordinary_tensors_writes_each() -> None:
    found = assign([[part(5, 0, 5, "a")], [part(4, 0, 4, "b")]])

    assert [[one.label for one in own] for own in found.parts] == [["w[rank 0]"], ["w[rank 1]"]]
    assert [leaf.rank for leaf in found.leaves] == [0, 1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_assign_of_replicas_spreads_them_evenly(world_size: int) -> None:
    lengths = [12 * SPLIT_BYTES, *[1000] * 11, 7]
    offers = [
        [
            TensorOffer((("dict", i),), "uint8", (length,), Box((0,), (length,)), None)
            for i, length in enumerate(lengths)
        ]
        for _ in range(world_size)
    ]

    found = assign(offers)

    loads = [sum(one.num_bytes for one in own) for own in found.parts]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= 1000


def test_assign_of_hybrid_shards_writes_each_box_once() -> None:
    length = 4 * SPLIT_BYTES
    offers = []
    for rank in range(4):  # two replicas of two shards
        start, stop = shard_bounds(length, 2, rank % 2)
        offers.append([part(length, start, stop - start)])

    found = assign(offers)

    boxes = [one.box for own in found.parts for one in own]
    assert fault((length,), boxes) is None
    assert {sum(one.num_bytes for one in own) for own in found.parts} == {length // 4}


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ([[part(4, 0, 4)], [ValueOffer(PATH, 1)]], "tensor on rank 0 and a plain value on rank 1"),
        ([[part(4, 0, 4)], [part(4, 0, 4, "x")]], "distributed tensor on some ranks"),
        ([[part(4, 0, 2)], [part(5, 2, 3)]], r"shape \(4,\) on rank 0 and uint8 of shape \(5,\)"),
        ([[part(4, 0, 2)], [part(4, 3, 1)]], "3 of 4 elements"),
        ([[part(4, 0, 3)], [part(4, 2, 2)]], "overlap"),
    ],
    ids=["kinds", "plain and distributed", "shapes", "hole", "overlap"],
)
def test_assign_of_disagreeing_ranks_is_an_error(offers: list[object], text: str) -> None:
    with pytest.raises(StateError, match=f"^w: .*{text}"):
        assign(offers)  # type: ignore[arg-type]  # mixed lists
