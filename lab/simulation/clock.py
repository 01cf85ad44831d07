"""Virtual time: actions run in the order of their times, those of one time in the order in which they were added."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0  # s
        self._heap: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._added = 0

    @property
    def idle(self) -> bool:
        return not self._heap

    def at(self, time: float, action: Callable[[], None], *, last: bool = False) -> None:
        """last: after all other actions of that time, those included that they add for it."""
        self._added += 1
        heapq.heappush(self._heap, (max(time, self.now), last, self._added, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def advance(self) -> None:
        """Go to the next action's time and run it."""
        self.now, _, _, action = heapq.heappop(self._heap)
        action()
