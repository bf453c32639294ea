"""Marks tests by the framework their folder names; skips examples whose framework is absent."""

from __future__ import annotations

import importlib.util

import pytest

FRAMEWORKS = ("torch", "mindspore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test below `tests/torch` or `tests/mindspore`, and sort out doctests."""
    for item in items:
        for framework in FRAMEWORKS:
            if framework in item.path.parent.parts and "tests" in item.path.parts:
                item.add_marker(framework)
            if isinstance(item, pytest.DoctestItem) and _needs(item, framework):
                reason = f"the example imports {framework}; the session {framework} runs it"
                item.add_marker(pytest.mark.skip(reason=reason))


def _needs(item: pytest.DoctestItem, framework: str) -> bool:
    imports = (f"import {framework}", f"from {framework}")
    found = any(one.source.startswith(imports) for one in item.dtest.examples)
    return found and importlib.util.find_spec(framework) is None
