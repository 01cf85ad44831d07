"""Programs of these tests are forks; ports 8000 and 8001, for one test at a time."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)


@pytest.fixture(scope="module", autouse=True)
def starts(forks: None) -> None:
    """For the modules of this folder only."""


@pytest.fixture(scope="module")
def demo_ports() -> Iterator[None]:
    """Held while the programs of a module use them: the workers of a run are processes of their own."""
    with (Path(tempfile.gettempdir()) / "paceline-tests-demo-ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
