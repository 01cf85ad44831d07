from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def modules_are_kept() -> None:
    """The garbage collector, which many of these tests call, does not look through all that has been imported."""
    gc.freeze()
