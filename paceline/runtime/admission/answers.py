"""Admission of answers: a place for each, its session, and the next session where an answer is written in stretches."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from paceline.runtime.admission.stretches import Stretches
from paceline.runtime.answer_places import AnswerPlaces
from paceline.runtime.preparation import Preparation
from paceline.runtime.service import GenerateRequest
from paceline.runtime.sessions.client import ClientSession
from paceline.runtime.sessions.egress import Egress
from paceline.runtime.units.plain_work import PlainWork

log = logging.getLogger("paceline.node")


class Admission:
    """Belongs to the event loop of a node."""

    def __init__(
        self, preparation: Preparation, places: AnswerPlaces, work: PlainWork, clients: set[ClientSession]
    ) -> None:
        """clients: the sessions under way."""
        self._preparation = preparation
        self._places = places
        self._work = work
        self._clients = clients
        self.preparing = 0  # admitted requests without a session yet

    async def prepare(self, request: GenerateRequest) -> ClientSession | Stretches:
        """An answer without a workflow. Raises as `Service.prepare`."""
        session = await self.admit(request)
        whole = session.prepared.end >= session.prepared.limit
        return session if whole else Stretches(session, self._go_on)

    async def admit(self, request: GenerateRequest, *, has_place: bool = False) -> ClientSession:
        """The first session of an answer. has_place: it is part of a workflow, which takes one."""
        if not has_place:
            self._places.check_room(request.owner)
        session = await self._begin(
            request.owner, lambda egress: self._preparation.prepare(request, egress, self._closed)
        )
        if not has_place:
            self._work.begin_text(session, request.max_tokens or session.prepared.max_new_tokens)
        return session

    async def _go_on(self, earlier: ClientSession) -> ClientSession:
        """The next stretch of an answer, in the place of the one that has ended."""
        prepared = earlier.prepared
        session = await self._begin(
            prepared.request.owner, lambda egress: self._preparation.go_on(earlier, egress, self._closed)
        )
        self._work.begin_text(session, prepared.limit - prepared.end)
        return session

    async def _begin(self, owner: str, prepare: Callable[[Egress], Awaitable[ClientSession]]) -> ClientSession:
        self._places.take(owner)
        self.preparing += 1
        egress = Egress()
        try:
            session = await prepare(egress)
        except BaseException:
            self._places.give_back(owner)
            if egress:
                log.info("sent to the other side for an answer that was not begun: %s", egress)
            raise
        finally:
            self.preparing -= 1
        self._clients.add(session)
        return session

    def _closed(self, session: ClientSession) -> None:
        if session in self._clients:
            self._clients.discard(session)
            self._work.end_text(session)
            self._places.give_back(session.prepared.request.owner)
