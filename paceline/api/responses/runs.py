"""Responses being written: one task each, which writes to the event log only and does not depend on a client.

Readers of the events read the log. A foreground response is cancelled by its reader when the client leaves; a
background response ends by itself, by a cancellation, or with the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.api.generation.streaming import GenerationFanIn
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.body import Json, encode_json
from paceline.api.http.errors import Failure, failure_of
from paceline.api.observation import AnswerWatch
from paceline.api.responses.events import (
    DivergedError,
    Event,
    ResponseEvents,
    Unsaid,
    close_interrupted,
    goes_on,
    kept_items,
    replay,
    stored_form,
)
from paceline.api.responses.log import EventLog, LiveEvents
from paceline.api.responses.request import ResponseRequest
from paceline.api.responses.store import ENDS, ResponseRecord, Turn
from paceline.core.fair import Shares
from paceline.errors import PacelineError, RequestError, StorageError
from paceline.runtime.service import Generation, GenerationResult

PREFIX = "resp_"  # of ids: conversations, which lie in the same log, have another
MAX_BACKGROUND = 576  # background responses at once, of which one key may have 512 (`core.fair`)
STOPPED = Failure(503, "The server was stopped before this response was finished.", "server_error")

_log = logging.getLogger("paceline.api")


DIVERGED = Failure(
    500,
    "The server that wrote this response was lost, and it cannot be continued exactly: what it read is not there.",
    "server_error",
)


@dataclass(slots=True)
class Run:
    live: LiveEvents
    response_events: ResponseEvents
    turn: Turn | None
    unsaid: Unsaid | None = None  # of a response that another server has begun
    cancelled: bool = False  # by a client, as opposed to the server's end
    failure: Exception | None = None
    final: Json | None = None  # the response, once it has ended
    began: asyncio.Event = field(default_factory=asyncio.Event)  # a task cancelled before would leave its generation
    task: asyncio.Task[None] | None = None
    is_unwatched: bool = False  # no request that is open here ends with it

    def new(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those of these events that have not been told yet. Raises DivergedError."""
        return events if self.unsaid is None else self.unsaid.of(events)


class Responses:
    """The responses of one application: those that are being written, and the log of all. Used on the event loop."""

    def __init__(self, log: EventLog, admission: AdmissionControl) -> None:
        self.log = log
        self._admission = admission
        self._runs: dict[str, Run] = {}
        self._background = Shares(MAX_BACKGROUND)  # of keys

    def start(
        self,
        asked: ResponseRequest,
        record: ResponseRecord,
        turn: Turn | None,
        generation: Generation,
        watch: AnswerWatch,
        response_events: ResponseEvents,
        begun: tuple[LiveEvents, Unsaid] | None = None,
    ) -> Run:
        """Start a run, which owns `generation`. A background run counts as an active request, so that a drain waits.

        `turn`: what was asked in a conversation, which gets it with the answer when that has ended well. `begun`: of a
        response that another server has begun; nobody waits for it here, and it is counted nowhere.

        Raises RequestError (429) when there are too many of those.
        """
        owner = record.owner
        background = asked.background and begun is None
        if background and not self._background.take(owner):
            raise RequestError(
                f"{self._background.held(owner)} background responses of this key are being written, and "
                f"{self._background.taken} in all, of {MAX_BACKGROUND}: wait for one to end, or cancel it.",
                status=429,
                type="rate_limit_error",
                code="too_many_background_responses",
            )
        live, unsaid = begun or (self.log.begin(record, stored=asked.store), None)
        run = self._runs[record.id] = Run(
            live, response_events, turn, unsaid, is_unwatched=asked.background or begun is not None
        )
        if background:
            self._admission.stay(owner)
        run.task = asyncio.create_task(self._write(run, generation, watch, background=background))
        return run

    async def find(self, response: str, owner: str, *, expired: bool = False) -> ResponseRecord:
        """`expired`: also one that is too old. Raises RequestError (404) when there is none, or another key created
        it."""
        record = await self.log.find(response, expired=expired) if response.startswith(PREFIX) else None
        if record is None or record.owner != owner:
            raise _missing(response)
        return record

    async def now(self, response: str) -> Json:
        """The current state of a response; failed if another process left it unfinished.

        Raises RequestError (404) when it has been deleted meanwhile.
        """
        running = self.log.running(response) is not None or await self.log.elsewhere(response)  # asked first: if it
        # ends meanwhile, the rows hold its end
        last = await self.log.last(response)
        if last is not None and last.type in ENDS:
            return replay([last])
        if rows := await self.log.all(response):
            return replay(rows if running else [*rows, *close_interrupted(rows)])
        if response not in self._runs:
            raise _missing(response)
        return self._runs[response].response_events.first  # it has been created, and nothing is written yet

    async def ended(self, run: Run) -> Json:
        """Wait until the response has ended and is committed. Raises PacelineError when it could not be written."""
        assert run.task is not None
        await asyncio.wait({run.task})
        await self.log.wait_committed(run.live)
        assert run.final is not None, "the task has ended"
        return run.final

    async def stop(self, response: str) -> None:
        run = self._runs.get(response)
        if run is not None:
            run.cancelled = True
            await self._interrupt(run)
            await self.ended(run)

    async def close(self) -> None:
        """Interrupt all running responses and write all their events: the server stops. They have failed then, but for
        those that can go on elsewhere, or at the next start, which are left as they are."""
        self.log.leaving = True  # or this server takes over what it abandons
        for run in list(self._runs.values()):
            if self._lasts(run) and not run.live.closed:
                self.log.abandon(run.live)
            await self._interrupt(run)
        if self.log.fleet is not None:
            await self._release()
        await asyncio.to_thread(self.log.close)

    async def leave(self) -> None:
        """Leave to other servers what nobody waits for here: this one drains."""
        self.log.leaving = True
        for run in list(self._runs.values()):
            if run.live.stored and not run.live.closed and run.is_unwatched:
                self.log.abandon(run.live)
                await self._interrupt(run)
        await self._release()

    def _lasts(self, run: Run) -> bool:
        """True for one that goes on when this server has ended."""
        return run.live.stored and (self.log.fleet is not None or goes_on(run.live.record))

    async def _release(self) -> None:
        try:
            await self.log.release()
        except StorageError as error:  # the others wait for the end of this one's lease
            _log.warning("what this server writes is not handed over: %s", error)

    async def _interrupt(self, run: Run) -> None:
        await run.began.wait()
        assert run.task is not None
        if run.final is None:
            run.task.cancel()
        await asyncio.wait({run.task})

    async def _write(self, run: Run, generation: Generation, watch: AnswerWatch, *, background: bool) -> None:
        live, response_events = run.live, run.response_events
        run.began.set()
        try:
            cuts = set() if self._lasts(run) else self._admission.cuts
            async with GenerationFanIn([generation], [watch], cuts) as fan_in:
                self._append(run, response_events.begin())
                async for _, event in fan_in.all():
                    if isinstance(event, GenerationResult):
                        self._finish(run, response_events.take(event), event)
                        continue
                    await self.log.room(live)  # before the event counts: it is lost where this is cancelled
                    self._append(run, response_events.take(event))
        except asyncio.CancelledError:
            if run.final is None and not live.closed:
                try:
                    self._finish(run, response_events.cancel() if run.cancelled else response_events.fail(STOPPED))
                except DivergedError:  # not all that was told has come again
                    run.final = await self.log.fail(live, STOPPED)
        except DivergedError:
            _log.error("%s cannot be continued exactly, and has failed", live.record.id)
            run.final = await self.log.fail(live, DIVERGED)
        except Exception as error:
            if not isinstance(error, PacelineError):
                _log.exception("a response failed (%s)", live.record.id)
            run.failure = error
            if run.final is None and not live.closed:
                self._finish(run, response_events.fail(failure_of(error)))
        finally:
            del self._runs[live.record.id]
            if background:
                self._background.give_back(live.record.owner)
                self._admission.leave(live.record.owner)

    def _append(self, run: Run, events: Sequence[Event]) -> None:
        if new := run.new(events):
            self.log.append_nowait(run.live, _encoded(new))

    def _finish(self, run: Run, events: Sequence[Event], done: GenerationResult | None = None) -> None:
        events = run.new(events)
        last = events[-1][1]
        final = last["response"]
        assert isinstance(final, dict), "the last event holds the response"
        run.final = final
        stored_last = None if done is None else stored_form(last, done)
        turn = None
        if run.turn is not None and done is not None:
            turn = replace(run.turn, items=(*run.turn.items, *kept_items(last)))
        self.log.append_nowait(run.live, _encoded(events), last=True, stored_last=stored_last, turn=turn)


def _encoded(events: Sequence[Event]) -> list[tuple[str, bytes]]:
    return [(kind, encode_json(body)) for kind, body in events]


def _missing(response: str) -> RequestError:
    return RequestError(f"Response with id {response[:64]!r} not found.", status=404, param="response_id")
