"""Placements as values, and what they are called."""

import pytest

from hp_dtensor import LayoutError, Placement, PlacementError, Replicate, Shard


@pytest.mark.parametrize(
    ("placement", "is_shard", "is_shard_of_dim_1", "is_replicate"),
    [
        pytest.param(Shard(1), True, True, False, id="shard"),
        pytest.param(Shard(0), True, False, False, id="shard-of-another-dim"),
        pytest.param(Replicate(), False, False, True, id="replicate"),
        pytest.param(Placement(), False, False, False, id="neither"),
    ],
)
def test_placement_tells_what_it_is(
    placement: Placement, is_shard: bool, is_shard_of_dim_1: bool, is_replicate: bool
) -> None:
    assert placement.is_shard() is is_shard
    assert placement.is_shard(1) is is_shard_of_dim_1
    assert placement.is_replicate() is is_replicate


def test_placements_are_equal_by_what_they_say() -> None:
    assert {Shard(0), Shard(0), Shard(1), Replicate(), Replicate()} == {
        Replicate(),
        Shard(0),
        Shard(1),
    }


@pytest.mark.parametrize("dim", [1.0, "0", None, True, (0,)], ids=str)
def test_shard_of_something_else_than_a_dim_raises(dim: object) -> None:
    with pytest.raises(LayoutError, match="Shard takes the number of a dim; found"):
        Shard(dim)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("kind", [NotImplementedError, ValueError, LayoutError])
def test_placement_error_is_caught_as_each_of_its_kinds(kind: type[Exception]) -> None:
    assert issubclass(PlacementError, kind)
