"""Where the results of a stage go, as its worker sees it."""

from __future__ import annotations

from typing import Protocol

from paceline.errors import EngineLost
from paceline.wire.fields import Frame
from paceline.wire.stages.messages import HiddenRows, KvRows, ScoreRows


class Outlet(Protocol):
    """Where results go. Called on the worker's thread; without effect once the other end is gone."""

    def to_head(self, message: Frame) -> None: ...

    def to_head_in_bulk(self, header: KvRows | ScoreRows, payload: bytes) -> None: ...

    def to_next(self, header: HiddenRows, payload: bytes) -> None:
        """Waits while the pipe to the next stage is full."""

    def lost(self, error: EngineLost) -> None:
        """The device is unusable: the process must end."""
