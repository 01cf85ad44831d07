"""Benches measure for minutes: slow as a whole."""

from tests.slow import slow_in

pytest_collection_modifyitems = slow_in(__file__)
