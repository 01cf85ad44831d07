"""A pair for all modules that ask for nothing but the fake model; ports 8000 and 8001, for one test at a time."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.pair import Pair, running_pair
from tests.forked import Starts, starting
from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)


@pytest.fixture(scope="module", autouse=True)
def starts(forks: None) -> None:
    """For the modules of this folder only."""


@pytest.fixture(scope="session")
def pair(forked: Starts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Linked, with the documents of `tests.e2e.pair`."""
    with ExitStack() as ended:
        with starting(forked):
            running = ended.enter_context(running_pair(tmp_path_factory.mktemp("pair")))
        yield running


@pytest.fixture(scope="module")
def demo_ports() -> Iterator[None]:
    """Held while the programs of a module use them: the workers of a run are processes of their own."""
    with (Path(tempfile.gettempdir()) / "paceline-tests-demo-ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
