"""A session's sequences on the engine of the draft model, which has a thread of its own."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import SeqId
from paceline.errors import EngineError
from paceline.runtime.engine_loop.requests import Rows, SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.sessions.driver import answered, requests
from paceline.strategies.base import DraftModelLost, Event, Forward, FromDraftModel

log = logging.getLogger("paceline.session")


class Receiver(Protocol):
    """What a session is to these ports."""

    @property
    def finished(self) -> bool: ...

    @property
    def salt(self) -> str | None:
        """Within which KV of its prompts is shared."""

    def deliver(self, event: Event) -> None: ...


class DraftModelPorts:
    """Implements `driver.EnginePorts`. The energy of drafts is not counted."""

    def __init__(self, worker: EngineWorker, session: Receiver) -> None:
        self.group: Group | None = None  # of its sequences, set once their claim of memory is known
        self._worker, self._session = worker, session
        self._loop = asyncio.get_running_loop()

    def claim(self, rows: int) -> None:
        """Claim memory for the answer: so many rows of KV, of all prompts together."""
        self.group = self._worker.group(rows)

    def allocate(self) -> SeqId:
        return self._worker.allocate()

    def forward(self, forward: Forward) -> None:
        session, worker = self._session, self._worker

        def answer(result: Rows | EngineError) -> None:
            scored = submitted[0].scored
            submitted.clear()
            if session.finished:
                return
            if isinstance(result, EngineError):
                log.warning("an answer goes on without the draft model: %s", result)
                session.deliver(DraftModelLost())
                return
            event = answered(forward, result, self._loop.time(), worker.answered, scored=scored)
            session.deliver(FromDraftModel(event))

        submitted = requests(forward, answer)
        for each in submitted:
            each.group, each.salt = self.group, session.salt
            worker.submit(each)

    def prune(self, seq: SeqId, keep: tuple[int, ...], live: tuple[int, ...]) -> None:
        self._worker.control(SequenceOp.prune(seq, keep, live))

    def release(self, seq: SeqId) -> None:
        self._worker.control(SequenceOp.release(seq))
