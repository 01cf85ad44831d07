"""Making a pipeline whole again after a loss, and giving up on it in time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from paceline.errors import LinkClosed
from paceline.runtime.stages.head.members import Members

log = logging.getLogger("paceline.stages")

PATIENCE_S = 4.0  # since a lost stage was heard, before answers fail
NOTICE_S = 1.0  # at least, of those since the loss was noticed
START_PATIENCE_S = 90.0  # for a process of this machine to be started again, or a spare to load its layers
PAUSE_S = 0.25  # between attempts


class Recovery:
    """Belongs to the pipeline's loop. Callers that wait hold `changed` meanwhile."""

    def __init__(
        self,
        changed: threading.Condition,
        members: Members,
        rebuild: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        """rebuild: called with `changed` held once all stages are in their places, and empty. give_up: called with a
        sentence when answers should wait no longer; attempts go on."""
        self.is_torn = False  # a link between two stages was lost while they were being linked
        self._changed, self._members = changed, members
        self._rebuild, self._give_up = rebuild, give_up
        self._why = ""  # the pipeline is not whole, in words
        self._lost_at = 0.0  # time of the loop; when the lost stage was heard last
        self._broken = asyncio.Event()

    @property
    def is_whole(self) -> bool:
        return not self.is_torn and all(member.is_up for member in self._members.order)

    def lost(self, reason: str, silence_s: float = 0.0) -> None:
        """A stage of a whole pipeline, of which nothing had been heard for so long."""
        self._why = reason
        self._lost_at = asyncio.get_running_loop().time() - min(silence_s, max(0.0, PATIENCE_S - NOTICE_S))

    def begin(self) -> None:
        self._broken.set()

    async def run(self) -> None:
        """For ever: wait for a loss, and make the pipeline whole again. Answers fail meanwhile, if that takes long."""
        while True:
            await self._broken.wait()
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.sleep(PAUSE_S / 5)  # its neighbours may have noticed before this end has
                while not await self._attempt():
                    await asyncio.sleep(PAUSE_S)
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _attempt(self) -> bool:
        """Put the stages in a row. True if the pipeline is whole."""
        try:
            await self._members.replace_lost()
            self.is_torn = False
            await self._members.link()
            with self._changed:
                if not self.is_whole:
                    return False  # lost meanwhile
                self._broken.clear()
                self._rebuild()
        except Exception as error:
            if not isinstance(error, LinkClosed):  # whoever waits must hear of it: the loop goes on
                log.exception("the stages could not be put in a row")
            if str(error) != self._why:
                log.info("not whole yet: %s", error)
            self._why = str(error) or type(error).__name__
            return False
        log.info("the pipeline is whole again after %.1f s", asyncio.get_running_loop().time() - self._lost_at)
        return True

    async def _watch(self) -> None:
        """Give up once nobody can be expected to make the pipeline whole soon. Whoever waits fails then, not when the
        attempt that is under way ends; who asks later is told what the latest attempt has met with."""
        told: str | None = None
        while True:
            waited = asyncio.get_running_loop().time() - self._lost_at
            patience = START_PATIENCE_S if self._members.is_hopeful else PATIENCE_S
            if waited >= patience and told != self._why:
                told = self._why
                self._give_up(told)
            await asyncio.sleep(PAUSE_S / 2)
