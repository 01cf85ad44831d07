"""The cloud's model as units of a device's workflows: texts of agents that read nothing private.

The scheduler decides which texts it is worth it for, by what they took there and by the link's round trip. Where the
cloud refuses, is lost or mute, all its units are taken away for a while, and what was being written there is written
here from its beginning. Not handled: several clouds, and a cloud's workflows on its devices' models.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import PacelineError
from paceline.runtime.link.connection import Link
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.sessions.remote_text import LEVELS, RemoteText
from paceline.runtime.units.registry import CLOUD, ENGINE
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.text_stream import TextStream
from paceline.strategies.strategy import Privacy
from paceline.workflow.agents.records import Prompt

log = logging.getLogger("paceline.workflow")

REST_S: Final = 10.0  # for which a cloud that did not write a text is asked for none
KNOWN_S: Final = 60.0  # for which it is believed to be slower than this side: one that was busy is tried again
TEXT: Final = 32  # tokens of a prompt and of a text, of which it is asked which side is faster
PHASES: Final = ("prefill", "decode")


class CloudUnits:
    """Those of a node's scheduler; none at a cloud. Belongs to the event loop."""

    def __init__(self, driver: WorkflowDriver) -> None:
        self._driver = driver
        self.names = tuple(unit.name for unit in driver.registry.units if unit.kind == CLOUD)
        self._link: Link | None = None
        self._until = -math.inf  # on the loop's clock
        self._forgets = -math.inf  # likewise: when it may be tried again

    def offer(self, link: Link | None) -> bool:
        """Whether they may be used now. Tells the scheduler, and what the link takes."""
        if not self.names:
            return False
        now = asyncio.get_running_loop().time()
        if link is None or not link.accepting or now < self._until:
            self._driver.lose(self.names)
            return False
        another = link is not self._link  # perhaps of another cloud, or over another network
        if another or now >= self._forgets:
            self._link, self._forgets = link, now + KNOWN_S
            if another or not self._is_faster(link.rtt or 0.0):
                for operation in self._operations:
                    self._driver.profiles.forget(operation, CLOUD)
        rate = link.bandwidth
        self._driver.reach(self.names, link.rtt or 0.0, math.inf if rate is None else rate)
        return True

    @property
    def _operations(self) -> list[str]:
        return [f"{self._driver.registry.models.agent}/{phase}" for phase in PHASES]

    def _is_faster(self, way_s: float) -> bool:
        """Whether it is known to write a text sooner than this side: then texts go there, and each tells what it takes
        now."""
        here, there = self._seconds(ENGINE), self._seconds(CLOUD)
        return here is not None and there is not None and way_s + there < here

    def _seconds(self, kind: str) -> float | None:
        """Of a text on a unit of a kind; None where it is not known."""
        known = (self._driver.profiles.get(operation, kind) for operation in self._operations)
        seconds = [profile.seconds(TEXT) for profile in known if profile is not None]
        return sum(seconds) if len(seconds) == len(PHASES) else None

    def rest(self, reason: str) -> None:
        """The cloud has not written a text: it is asked for none for a while."""
        log.warning("the cloud writes no texts of workflows for %g s: %s", REST_S, reason)
        self._until = asyncio.get_running_loop().time() + REST_S
        self._driver.lose(self.names)


@dataclass(slots=True)
class CloudTexts:
    """For one request. egress: counts what its texts have sent."""

    units: CloudUnits
    link: Link
    privacy: Privacy
    cache_key: bytes
    egress: Egress = field(default_factory=Egress)

    def has(self, unit: str) -> bool:
        return unit in self.units.names

    def rest(self, reason: str) -> None:
        self.units.rest(reason)

    def write(self, messages: Prompt, max_tokens: int) -> TextStream:
        """Begin a text, greedy as here. Raises PacelineError where this level of privacy lets none leave."""
        if self.privacy not in LEVELS:
            raise PacelineError(f"at {self.privacy} no text is written elsewhere")
        told = [{name: str(value) for name, value in message.items()} for message in messages]
        return TextStream(RemoteText(self.link, told, max_tokens, self.privacy, self.cache_key, self.egress))


def cloud_texts(
    units: CloudUnits, link: Link | None, privacy: Privacy, cache_key: Callable[[], bytes]
) -> CloudTexts | None:
    """For a request; None where there is no cloud now, or its level of privacy keeps all texts here."""
    if not units.offer(link) or link is None or privacy not in LEVELS:
        return None
    return CloudTexts(units, link, privacy, cache_key())
