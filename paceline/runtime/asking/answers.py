"""What a device's owner answered at enrolment: who among a cloud's clients may ask. Kept beside the activity log.

A setting comes before the answer. Without either nobody may ask.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from pathlib import Path
from urllib.parse import urlsplit

from paceline.core.permission import NOBODY, MayAsk
from paceline.runtime.asking.activity import FILE, open_file
from paceline.settings import AgentSettings
from paceline.sqlite import speaking


class EnrolmentAnswers:
    """The answers in a state directory, by cloud. Raises ConfigError when their file cannot be used."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def get(self, cloud: str) -> MayAsk | None:
        """The answer for this cloud, by its URL; None where there is none. Creates no file."""
        if not self.path.exists():
            return None
        with self._speaking(), closing(open_file(self.path)) as rows:
            found = rows.execute("SELECT may_ask FROM answers WHERE cloud = ?", (_place(cloud),)).fetchone()
        return None if found is None else MayAsk.parse(found[0])

    def put(self, cloud: str, may_ask: MayAsk) -> None:
        with self._speaking(), closing(open_file(self.path)) as rows:
            rows.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (_place(cloud), str(may_ask)))

    def _speaking(self) -> AbstractContextManager[None]:
        return speaking(self.path, "an activity log")


def permission(settings: AgentSettings) -> tuple[MayAsk, str]:
    """Who may ask this device, and where that was said. Raises ConfigError for answers that cannot be read."""
    if settings.cloud_may_ask is not None:
        return MayAsk.parse(settings.cloud_may_ask), "as set"
    answered = None if settings.cloud is None else EnrolmentAnswers(settings.state_dir).get(settings.cloud)
    return (NOBODY, "the default") if answered is None else (answered, "as answered at enrolment")


def _place(cloud: str) -> str:
    """The cloud's host, port and path: the same for http and ws."""
    url = urlsplit(cloud)
    return url.netloc.lower() + url.path.rstrip("/")
