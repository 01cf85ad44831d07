"""Clocks that tests set."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


def read_from(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float], *modules: ModuleType) -> None:
    """Have these modules read the time from this clock, s."""
    for module in modules:
        monkeypatch.setattr(module, "time", SimpleNamespace(**{**vars(time), "time": clock, "monotonic": clock}))
