"""Benches measure for minutes: slow as a whole. The programs that they start are forks, since no figure is tested."""

import pytest

from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)


@pytest.fixture(scope="module", autouse=True)
def starts(forks: None) -> None:
    """For the modules of this folder only."""
