"""What the functions on tensors say to objects of no framework."""

from collections.abc import Callable

import pytest

from hp_dtensor import LayoutError, box_of, is_dtensor, layout_of, local_of


@pytest.mark.parametrize("value", [None, 3, [1.0], "x"], ids=str)
def test_is_dtensor_of_plain_object_is_false(value: object) -> None:
    assert not is_dtensor(value)


@pytest.mark.parametrize("ask", [layout_of, local_of, box_of])
def test_question_about_plain_object_names_its_type(ask: Callable[[object], object]) -> None:
    with pytest.raises(LayoutError, match="a DTensor was expected and a list was found"):
        ask([1.0])
