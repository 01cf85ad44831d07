"""How many questions of the cloud a device answers in a minute and in an hour. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

MINUTE_S = 60.0
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class AskLimits:
    """0: none."""

    per_minute: int = 60  # a person whose front end asks four times a message
    per_hour: int = 1200


class AskCounter:
    """Counts admitted questions over the last minute and hour."""

    def __init__(self, limits: AskLimits, earlier: Iterable[float] = ()) -> None:
        """earlier: times of questions that were admitted before, so that a restart does not renew the budget."""
        self._limits = limits
        self._times = deque(sorted(earlier))

    def take(self, now: float) -> str | None:
        """Count one more question at this time, in s; or why it is one too many, as the end of a sentence."""
        while self._times and self._times[0] <= now - HOUR_S:
            self._times.popleft()
        per_minute, per_hour = self._limits.per_minute, self._limits.per_hour
        if 0 < per_hour <= len(self._times):
            minutes = max(1, round((self._times[-per_hour] + HOUR_S - now) / 60))
            return f"its budget of {per_hour} questions an hour is used up for {minutes} min"
        if 0 < per_minute <= sum(time > now - MINUTE_S for time in self._times):
            return f"it answers no more than {per_minute} questions of the cloud a minute"
        self._times.append(now)
        return None
