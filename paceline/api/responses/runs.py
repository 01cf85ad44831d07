"""Responses being written: one task each, which goes on with or without a client, and writes to the token log only.

Whoever wants the events reads the log. A response in the foreground is cancelled by who read it when its client leaves;
one in the background ends by itself, by a cancellation, or with the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from paceline.api.generation.fan_in import GenerationFanIn
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.errors import Failure, failure_of
from paceline.api.http.strict_json import encode_json
from paceline.api.responses.event_log import EventLog, EventStream
from paceline.api.responses.event_store import Header
from paceline.api.responses.events import Event, Json, ResponseEvents
from paceline.errors import PacelineError
from paceline.runtime.service import Generation, GenerationResult

STOPPED = Failure(503, "The server was stopped before this response was finished.", "server_error")

_log = logging.getLogger("paceline.api")


class Run:
    """A response being written."""

    def __init__(self, track: EventStream, narration: ResponseEvents) -> None:
        self.track = track
        self.narration = narration
        self.cancelled = False  # somebody wants it to end, rather than the server
        self.failure: Exception | None = None
        self.final: Json | None = None  # the response, once it has ended
        self.began = asyncio.Event()  # before that a cancelled task would leave what it owns as it is
        self.task: asyncio.Task[None] | None = None


class Runs:
    """All of them. Lives on the event loop."""

    def __init__(self, log: EventLog, gate: AdmissionControl) -> None:
        self._log = log
        self._gate = gate
        self._runs: dict[str, Run] = {}

    def start(
        self, header: Header, prepared: Generation, narration: ResponseEvents, *, stored: bool, background: bool
    ) -> Run:
        """Owns `prepared` from then on. A run in the background holds a place, so that a drain waits for it."""
        run = Run(self._log.begin(header, stored=stored), narration)
        self._runs[header.id] = run
        if background:
            self._gate.stay()
        run.task = asyncio.create_task(self._write(run, prepared, background=background))
        return run

    def first(self, response: str) -> Json | None:
        """As it was before a word was written; None when it does not run."""
        run = self._runs.get(response)
        return None if run is None else run.narration.first

    async def ended(self, run: Run) -> Json:
        """The response when it has ended and is written. Raises PacelineError when it could not be written."""
        assert run.task is not None
        await asyncio.wait({run.task})
        await self._log.settled(run.track)
        assert run.final is not None, "the task has ended"
        return run.final

    async def stop(self, response: str) -> None:
        """Cancel it, if it runs, and wait until that is written."""
        run = self._runs.get(response)
        if run is not None:
            run.cancelled = True
            await self._cut(run)
            await self.ended(run)

    async def close(self) -> None:
        """The server stops: what still runs is marked as failed."""
        for run in list(self._runs.values()):
            await self._cut(run)

    async def _cut(self, run: Run) -> None:
        await run.began.wait()
        assert run.task is not None
        if run.final is None:
            run.task.cancel()
        await asyncio.wait({run.task})

    async def _write(self, run: Run, prepared: Generation, *, background: bool) -> None:
        track, narration = run.track, run.narration
        run.began.set()
        try:
            async with GenerationFanIn([prepared]) as choices:
                await self._log.append(track, _encoded(narration.begin()))
                while run.final is None:
                    said = await choices.next()
                    assert said is not None, "without patience there is no silence"
                    events = narration.take(said[1])
                    if isinstance(said[1], GenerationResult):
                        self._finish(run, events)
                    elif events:
                        await self._log.append(track, _encoded(events))
        except asyncio.CancelledError:
            if run.final is None:
                self._finish(run, narration.cancel() if run.cancelled else narration.fail(STOPPED))
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("a response failed (%s)", track.header.id)
            run.failure = error
            if run.final is None:
                self._finish(run, narration.fail(failure_of(error)))
        finally:
            del self._runs[track.header.id]
            if background:
                self._gate.leave()

    def _finish(self, run: Run, events: Sequence[Event]) -> None:
        final = events[-1][1]["response"]
        assert isinstance(final, dict), "the last event holds the response"
        run.final = final
        self._log.put(run.track, _encoded(events), last=True)


def _encoded(events: Sequence[Event]) -> list[tuple[str, bytes]]:
    return [(kind, encode_json(body)) for kind, body in events]
