"""Work of no workflow on the scheduler's units: plain requests' searches, embeddings and answers.

Nobody schedules it, so it may run beside a launch on the same unit. It asks for bandwidth as a launch does, so launches
are predicted to take longer while it runs, and what it takes is learnt as of launches.
"""

from __future__ import annotations

from paceline.workflow.activity import Activity, Other
from paceline.workflow.events import OtherBegan, OtherEnded
from paceline.workflow.profiling.profiles import ProfileStore
from paceline.workflow.units import UnitPool


class OtherWork:
    def __init__(self, activity: Activity, units: UnitPool, profiles: ProfileStore) -> None:
        self._activity = activity
        self._units = units
        self._profiles = profiles
        self._began: dict[int, OtherBegan] = {}

    def begin(self, event: OtherBegan) -> None:
        """Raises KeyError for a unit that there is none of."""
        unit = self._units[event.unit]
        profile = self._profiles.get(event.operation, unit.kind)
        bandwidth = 0.0 if profile is None else profile.bandwidth(event.items)
        self._activity.add_other(event.id, Other(memory=unit.memory, bandwidth=bandwidth, began=event.now))
        self._began[event.id] = event

    def end(self, event: OtherEnded) -> None:
        """What never began is ignored."""
        began = self._began.pop(event.id, None)
        if began is None:
            return
        other = self._activity.remove_other(event.id)
        items = began.items if event.items is None else event.items
        if items > 0:
            seconds, kind = event.now - began.now, self._units[began.unit].kind
            self._profiles.learn(began.operation, kind, items, seconds, other.overlap(event.now))
