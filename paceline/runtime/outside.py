"""Answers that a stranger's endpoint writes, any that speaks OpenAI's chat completions and tells no logits.

What goes there is redacted (`core.redaction`), and what comes back has its names again: at `open` the conversation
and public passages, at `document-private` and `answer-private` the last question alone (`rag.prompt.query_of`), at
`local-only` nothing. No passage of a device's document goes there at any level. A request asks for it by the strategy
`outside`; nothing is sent for others. Where the endpoint fails, this side goes on with the answer as it would have
written it.

Not handled: tools, forms, logprobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from paceline.core.policy import Decision
from paceline.core.redaction import Finder, Redactor, Restorer
from paceline.core.sampling.sampler import SamplingParams
from paceline.errors import EndpointError, RequestError
from paceline.rag.prompt import passages_text, query_of
from paceline.rag.records import Passage
from paceline.runtime.admission import AnswerPlaces
from paceline.runtime.endpoint import OutsideEndpoint, Told
from paceline.runtime.peers import Peers
from paceline.runtime.policy import HeldAnswer, forbidden
from paceline.runtime.resources import Resources
from paceline.runtime.service import (
    AUTO,
    Citation,
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    TextDelta,
)
from paceline.runtime.sessions.driver import Egress, Timeline
from paceline.runtime.sessions.output_text import StopStrings
from paceline.runtime.sessions.prompts import PromptSet
from paceline.runtime.sessions.remote import Admit, passages_for
from paceline.runtime.units import OUTSIDE
from paceline.strategies.base import FinishReason
from paceline.wire.messages import WRITE

log = logging.getLogger("paceline.outside")

MAX_SENT: Final = 1 << 20  # characters of a conversation
MAX_CHARACTERS: Final = 64  # that a token may have, on average over a text
GREEDY: Final = SamplingParams(temperature=0.0)

# ---- what is sent ---------------------------------------------------------------------------------------------------
_NOTE: Final = (
    "Square brackets such as [PERSON_1] stand for names and numbers that are withheld. Copy them unchanged where they "
    "are meant, and do not ask for them."
)
_ROLES: Final = ("system", "user", "assistant")


def learnt(request: GenerateRequest, find: Finder) -> Redactor:
    """A redactor that knows the whole conversation, whatever of it is sent. On any thread."""
    redactor = Redactor(find)
    for message in request.prompt.messages:
        redactor.learn(message["content"])
    redactor.learn(query_of(request.prompt.messages))
    return redactor


def told(request: GenerateRequest, redactor: Redactor, passages: Sequence[Passage]) -> Told:
    """All that the endpoint is told. passages: public ones. On any thread."""
    messages = [{"role": "user", "content": redactor.redact(query_of(request.prompt.messages))}]
    if request.wish.privacy == "open":
        messages = [
            {"role": each["role"] if each["role"] in _ROLES else "user", "content": redactor.redact(each["content"])}
            for each in request.prompt.messages
        ]
        texts = [f"[{number}] {redactor.redact(passages_text(each))}" for number, each in enumerate(passages, 1)]
        if texts:
            messages.insert(0, {"role": "system", "content": "\n\n".join(["Passages that may help:", *texts])})
    return [*([{"role": "system", "content": _NOTE}] if len(redactor) else []), *messages]


# ---- answers --------------------------------------------------------------------------------------------------------
class OutsideWriter:
    """Answers and agents' texts of a node that are written there. Belongs to the node's event loop."""

    def __init__(
        self, endpoint: OutsideEndpoint, resources: Resources, peers: Peers, places: AnswerPlaces, otherwise: Admit
    ) -> None:
        """otherwise: prepares an answer in a place that is taken in any case, where the endpoint fails."""
        self.endpoint = endpoint
        self._resources, self._peers, self._places = resources, peers, places
        self._otherwise = otherwise

    async def prepare(self, request: GenerateRequest, *, held: Decision | None = None) -> Generation:
        """An answer; nothing is sent there before it runs. held: of a workflow that has begun, whose answer has a place
        in any case. Raises RequestError."""
        begun = held is not None
        if held is None:
            request, held = await self._held(request)
        guard, owner = self._resources.guard, request.account.owner
        self._places.take(owner, anyhow=begun)
        try:
            wanted, now = request.output.timeline, asyncio.get_running_loop().time
            egress = Egress(Timeline(self._resources.side, now) if wanted else None)
            own, others, missing = await self._passages(request, egress)
            redactor = await self.redactor(request)
            encode = self._resources.tokenizer.encode

            def prompt() -> tuple[Told, int]:
                messages = told(request, redactor, (*own, *others))
                return messages, sum(len(encode(each["content"])) for each in messages)

            messages, tokens = await self._resources.units.do("search", prompt, owner)
        except BaseException:
            self._places.give_back(owner)
            raise
        cited = PromptSet((), own, 0, peer_passages=others).citations(self._resources.side)
        written = OutsideText(
            self.endpoint, redactor, messages, request.wish.sampling, request.output.max_tokens, egress
        )
        written.told = partial(guard.spend, "cloud_tokens")
        answer = OutsideAnswer(
            request, written, tokens, cited, missing, encode, partial(self._places.give_back, owner), self._otherwise
        )
        return HeldAnswer(answer, guard, held, request.prompt.messages) if guard.policy else answer

    async def begin(self, request: GenerateRequest) -> tuple[GenerateRequest, Admit]:
        """Take the place of a workflow, see `Preparation.begin`."""
        request, held = await self._held(request)
        if request.wish.privacy != "open":
            raise RequestError(
                f"At the privacy level '{request.wish.privacy}' nothing that a workflow finds may go outside: ask "
                "without a workflow, or at 'open'.",
                param="paceline.workflow",
            )
        self._places.take(request.account.owner)
        return request, partial(self.prepare, held=held)

    async def redactor(self, request: GenerateRequest) -> Redactor:
        return await self._resources.units.do(
            "search", partial(learnt, request, self.endpoint.find), request.account.owner
        )

    async def texts(self, request: GenerateRequest) -> tuple[Callable[[Told, int], OutsideText], Egress]:
        """What begins the texts of a workflow's agents, at `open`, and counts what they send."""
        redactor, egress = await self.redactor(request), Egress()

        def begin(messages: Told, max_tokens: int) -> OutsideText:
            hidden = [{**each, "content": redactor.redact(each["content"])} for each in messages]
            spend = partial(self._resources.guard.spend, "cloud_tokens")
            return OutsideText(self.endpoint, redactor, hidden, GREEDY, max_tokens, egress, spend)

        return begin, egress

    async def _held(self, request: GenerateRequest) -> tuple[GenerateRequest, Decision]:
        """The request at the level to which the owner's rules hold it. Raises RequestError for what is not asked of a
        stranger."""
        guard, held = self._resources.guard, Decision(request.wish.privacy)
        if guard.policy:
            guard.refuse_spent()
            held = await asyncio.to_thread(guard.decide, request, self._resources.info.name)
            request = guard.held_to(request, held)
        self._check(request, held)
        return request, held

    def _check(self, request: GenerateRequest, held: Decision) -> None:
        level, output = request.wish.privacy, request.output
        if level == "local-only" or (level == "answer-private" and self._resources.side == "cloud"):
            which = f"redacted, which the privacy level '{level}' forbids"
            sentence = f"The strategy 'outside' sends the question away, {which}"
            if held.rule:
                raise forbidden(f"{sentence}: {held.why}.", "paceline.privacy")
            raise RequestError(f"{sentence}.", param="paceline.privacy")
        wrong = {
            "raw tokens": request.prompt.tokens is not None,
            "a form of the answer, or tools": output.constraint is not None,
            "logprobs": request.wish.logprobs,
            "stop_token_ids": bool(output.stop_token_ids),
            "logit_bias": bool(request.wish.sampling.logit_bias),
        }
        if asked := [name for name, is_asked in wrong.items() if is_asked]:
            raise RequestError(
                f"The strategy 'outside' writes plain text, without {asked[0]}.", param="paceline.strategy"
            )
        if sum(len(message["content"]) for message in request.prompt.messages) > MAX_SENT:
            raise RequestError(f"The strategy 'outside' takes {MAX_SENT} characters at most.", param="messages")

    async def _passages(
        self, request: GenerateRequest, egress: Egress
    ) -> tuple[tuple[Passage, ...], tuple[Passage, ...], str | None]:
        """Public passages of this side and of the other one, and who of both is missing."""
        sources, side = request.sources, self._resources.side
        if request.wish.privacy != "open":
            return (), (), None
        if sources.passages is not None:
            own = tuple(each for each in sources.passages if side == "cloud" or each.url)
            return own, sources.other_passages if side == "device" else (), None
        if side == "device":
            _, link = self._peers.peer_for(request)
            found = await passages_for(request, link, egress, expected=self._peers.expects(request))
            return (), tuple(found or ()), "cloud_missing" if found is None else None
        store = self._resources.readable(request.account.owner, peer=True)  # a stranger reads no more than a peer
        if store is None or not request.wish.documents:
            return (), (), None
        search = partial(store.search, query_of(request.prompt.messages), request.wish.documents, sources.selection)
        own_found = await self._resources.units.do(
            "search", partial(search, min_score=sources.min_score), request.account.owner
        )
        return tuple(own_found), (), None


@dataclass(slots=True)
class OutsideText:
    """A text that is written there, with its names put back; also of an agent. Raises EndpointError."""

    endpoint: OutsideEndpoint
    redactor: Redactor
    messages: Told
    sampling: SamplingParams
    max_tokens: int | None
    egress: Egress
    told: Callable[[int], object] = lambda _: None  # tokens that were written
    reason: FinishReason = "stop"  # once it has ended

    async def pieces(self) -> AsyncGenerator[str]:
        restorer, room = Restorer(self.redactor), MAX_CHARACTERS * (self.max_tokens or MAX_SENT)
        stream = self.endpoint.stream(self.messages, self.sampling, self.max_tokens, self._count)
        try:
            async with aclosing(stream) as pieces:
                async for text, end in pieces:
                    self.reason, room = end or self.reason, room - len(text)
                    yield restorer.push(text)
                    if room < 0:
                        self.reason = "length"
                        break
        except EndpointError:
            yield restorer.flush()
            raise
        yield restorer.flush()

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        tokens = 0
        async with aclosing(self.pieces()) as pieces:
            async for text in pieces:
                if text:
                    tokens += 1  # about
                    self.told(1)
                    yield TextDelta(text, 1)
        yield GenerationResult(self.reason, 0, tokens, WRITE, f"an agent's text that {self.endpoint.name} writes")

    async def aclose(self) -> None:
        """Nothing is held while it is not run."""

    def _count(self, sent: int, received: int) -> None:
        self.egress.beside(OUTSIDE, sent=sent, received=received)
        if sent:
            self.endpoint.on_sent(OUTSIDE, sent)


@dataclass(slots=True)
class OutsideAnswer:
    """A `Generation`."""

    request: GenerateRequest
    written: OutsideText
    prompt_tokens: int  # of all that is sent, in this side's vocabulary
    citations: tuple[Citation, ...]  # of the passages that are sent
    missing: str | None  # as `degraded`
    encode: Callable[[str], Sequence[int]]
    closed: Callable[[], None] | None  # called once
    otherwise: Admit
    _said: str = ""
    _tokens: int = 0

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        stops, stopped, fault = StopStrings(self.request.output.stop), False, None
        try:
            async with aclosing(self.written.pieces()) as pieces:
                async for piece in pieces:
                    text, stopped = stops.push(piece)
                    if text:
                        yield self._delta(text)
                    if stopped:
                        break
        except EndpointError as error:
            fault = error
        finally:
            await self.aclose()
        if not (self._said or stops.held or stopped or fault):
            fault = EndpointError(f"{self.written.endpoint.name} wrote nothing")
        if fault is not None:
            async for event in self._go_on(fault, stops):
                yield event
            return
        if rest := stops.flush():
            yield self._delta(rest)
        yield self._result(GenerationResult("stop" if stopped else self.written.reason, 0, 0, OUTSIDE, "", stops.found))

    async def aclose(self) -> None:
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed()
            if egress := self.written.egress:
                log.info("sent to %s: %s", self.written.endpoint.name, egress.told(self.request.account.trace))

    def _delta(self, text: str) -> TextDelta:
        self._said += text
        return TextDelta(text, self._count(text))

    def _count(self, text: str) -> int:
        """The tokens of a text that the endpoint has written."""
        tokens = len(self.encode(text))
        self._tokens += tokens
        self.written.told(tokens)
        return tokens

    async def _go_on(self, fault: EndpointError, stops: StopStrings) -> AsyncGenerator[GenerateEvent]:
        """The rest of the answer, as it would be written without the endpoint. stops: hold what may begin a stop string
        that ends here. Raises RequestError where the request wants none."""
        request, output = self.request, self.request.output
        log.warning("an answer goes on without it: %s", fault, extra={"id": request.account.trace})
        if request.joining.on_loss != "continue":
            status = 429 if fault.status == 429 else 503
            raise RequestError(str(fault), status=status, type="server_error", code=f"{OUTSIDE}_lost") from fault
        *before, last = request.prompt.messages
        self._count(stops.held)
        if said := self._said + stops.held:
            begun = last["content"] if last["role"] == "assistant" else ""
            before += [] if last["role"] == "assistant" else [last]
            last = {"role": "assistant", "content": begun + said}
        limit = None if output.max_tokens is None else max(1, output.max_tokens - self._tokens)
        generation = await self.otherwise(
            replace(
                request,
                prompt=replace(request.prompt, messages=(*before, last), shared=None),
                output=replace(output, max_tokens=limit),
                wish=replace(request.wish, strategy=AUTO),
            )
        )
        tokens = 0
        async with aclosing(generation.run()) as events:
            async for event in events:
                if isinstance(event, GenerationResult):
                    if rest := stops.flush():
                        yield TextDelta(rest, 0)
                    yield self._result(replace(event, degraded=f"{OUTSIDE}_lost"), str(fault))
                    return
                tokens += event.tokens
                text, stopped = (event.text, False) if event.thinking else stops.push(event.text)
                yield replace(event, text=text)
                if stopped:
                    break
        done = GenerationResult("stop", 0, tokens, OUTSIDE, "", stops.found, degraded=f"{OUTSIDE}_lost")
        yield self._result(done, str(fault))

    def _result(self, done: GenerationResult, fault: str = "") -> GenerationResult:
        """The whole answer's. done: of this side's part, where the endpoint has failed, or empty."""
        written, told = self.written, self.written.egress.timeline
        count = len(written.redactor)
        sent = "the conversation" if self.request.wish.privacy == "open" else "the question alone"
        why = f"the request asks for it; written by {written.endpoint.name}, who was told {sent}, {count} redactions"
        stats = {**done.stats, "redactions": float(count)}
        for name, size in written.egress.stats().items():
            stats[name] = stats.get(name, 0.0) + size
        return replace(
            done,
            prompt_tokens=done.prompt_tokens or self.prompt_tokens,
            completion_tokens=done.completion_tokens + self._tokens,
            strategy_reason="; ".join(filter(None, (why, fault, done.strategy_reason))),
            degraded=done.degraded or self.missing,
            citations=done.citations or self.citations,
            found=done.found or self.citations,
            stats=stats,
            timeline=done.timeline or (() if told is None else told.moments()),
        )
