"""An asynchronous engine with one batch under way: as an `Engine`, so that it obeys the same properties."""

from __future__ import annotations

from typing import cast

from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch
from paceline.engine.base import AsyncEngine, Engine, Output


class Blocking(WrappedEngine):
    def __init__(self, inner: AsyncEngine) -> None:
        super().__init__(cast(Engine, inner))  # all but `forward` is the same
        self._runner = inner

    def forward(self, batch: Batch) -> Output:
        return self._runner.collect(self._runner.submit(batch))
