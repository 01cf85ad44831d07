"""Fixtures of the scenarios: sizes, seeds, and figures for the table that `scripts/reliability` prints."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import Pair, Server, running_pair
from tests.forked import Starts, starting
from tests.reliability.listening import Heard, heard_server
from tests.reliability.real_server import RealServer, hurried, many_files, real_server
from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)

SEED = 1  # without --seed


Size = Callable[[int, int], int]  # size(short, nightly): how many of something this run takes


class Figure(Protocol):
    def __call__(
        self, what: str, value: float, *, at_most: float | None = None, at_least: float | None = None, unit: str = ""
    ) -> None:
        """Put a measured figure into the table, beside what is asked of it.

        It fails no test: times on a busy machine are reported, and judged in the table. What must hold on every
        machine (nothing lost, nothing repeated, no 5xx) is asserted by the test itself.
        """


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    def record(
        what: str, value: float, *, at_most: float | None = None, at_least: float | None = None, unit: str = ""
    ) -> None:
        record_property(
            "figure", {"what": what, "value": value, "at_most": at_most, "at_least": at_least, "unit": unit}
        )

    return record


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    nightly = bool(request.config.getoption("nightly", default=False))
    return lambda short, long: long if nightly else short


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by --seed and by the test's name, so that one test alone draws what it draws among all."""
    seed = request.config.getoption("seed", default=SEED)
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="module", autouse=True)
def starts(forks: None) -> None:
    """For the modules of this folder only."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One for a scenario that fills or damages it, with commands beside it."""
    with Children(tmp_path) as children:
        yield Server(children, tmp_path)


@pytest.fixture(scope="session")
def hall(forked: Starts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all scenarios that attack one: with keys, the fake model, and an answer's token every 5 ms."""
    with many_files(), ExitStack() as ended:
        with starting(forked):
            directory = tmp_path_factory.mktemp("hall")
            server = real_server(directory, *hurried(directory))
            running = ended.enter_context(server)
        yield running


@pytest.fixture(scope="session")
def heard(forked: Starts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    """One server for the scenarios in which nothing may be fetched."""
    with ExitStack() as ended:
        with starting(forked):
            running = ended.enter_context(heard_server(tmp_path_factory.mktemp("heard")))
        yield running


@pytest.fixture(scope="session")
def pair(forked: Starts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A linked pair. Modules that stop one have another."""
    with ExitStack() as ended:
        with starting(forked):
            running = ended.enter_context(running_pair(tmp_path_factory.mktemp("pair")))
        yield running
