"""Marks for folders and cases that are slow as a whole; a slow module says `pytestmark = pytest.mark.slow` itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Hook = Callable[[list[pytest.Item]], None]


def slow_in(conftest: str, unless: Callable[[str], bool] = lambda _: False) -> Hook:
    """The `pytest_collection_modifyitems` of a conftest.py: all below its folder is slow unless its id is excepted."""
    folder = Path(conftest).parent

    def mark(items: list[pytest.Item]) -> None:
        for item in items:
            if item.path.is_relative_to(folder) and not unless(item.nodeid):
                item.add_marker(pytest.mark.slow)

    return mark
