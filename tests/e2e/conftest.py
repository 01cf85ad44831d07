"""A pair for all modules that ask for nothing but the fake model; ports 8000 and 8001, for one test at a time."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.pair import Pair, running_pair
from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Linked, with the documents of `tests.e2e.pair`."""
    with running_pair(tmp_path_factory.mktemp("pair")) as running:
        yield running


@pytest.fixture(scope="module")
def demo_ports() -> Iterator[None]:
    """Held while the programs of a module use them: the workers of a run are processes of their own."""
    with (Path(tempfile.gettempdir()) / "paceline-tests-demo-ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
