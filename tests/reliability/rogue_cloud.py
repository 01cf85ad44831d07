"""A cloud that asks questions of its own: the real routes and link, and no node behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.api.http.server import listen, url_of
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.connection import Link
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import encode_options
from paceline.wire.messages import (
    AggregateOptions,
    ChatMessage,
    CloseSession,
    EvidenceWeight,
    Introduction,
    OpenSession,
    Sampling,
    SessionFrame,
    SessionMessage,
    Targets,
)
from server.devices import Registry
from server.links import Links
from tests.reliability.raw_link import serving

ANSWER_TOKENS = 8
EOS = ByteTokenizer().eos_ids
GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=[],
    seed=1,
    repetition_penalty=1.0,
)


def question(text: str, **changes: object) -> OpenSession:
    """The opening of a session of the cloud's own making. The session's number is set when it is sent."""
    opening = OpenSession(
        session=0,
        strategy="aggregate",
        messages=[ChatMessage("user", text)],
        query="",
        sampling=GREEDY,
        max_tokens=ANSWER_TOKENS,
        top_k_documents=2,
        privacy="document-private",
        options=encode_options(AggregateOptions(aggregator="mixture")),
        targets=[],
        epoch=0,
        constraint=None,
        asker="",
    )
    return msgspec.structs.replace(opening, **changes)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the device sent in one session."""

    messages: tuple[SessionFrame, ...]

    @property
    def kinds(self) -> set[str]:
        return {message.kind for message in self.messages}

    @property
    def refusal(self) -> str | None:
        last = self.messages[-1]
        return last.reason if isinstance(last, CloseSession) else None

    @property
    def targets(self) -> list[int]:
        return [token for message in self.messages if isinstance(message, Targets) for token in message.tokens]


class RogueCloud:
    def __init__(self, url: str, registry: Registry) -> None:
        self.url = url
        self.registry = registry
        self.links: asyncio.Queue[Link] = asyncio.Queue()

    def on_link(self, link: Link, peer: str) -> None:  # noqa: ARG002  # as of a node
        self.links.put_nowait(link)

    async def ask(self, link: Link, opening: OpenSession, *more: SessionMessage, weight: float | None = None) -> Heard:
        """Open a session, send a weight and more, and collect what comes until the answer or the session has ended."""
        heard: list[SessionFrame] = []
        ended, wanted = asyncio.Event(), opening.max_tokens - len(opening.targets)

        def received(message: SessionFrame) -> None:
            heard.append(message)
            targets = Heard(tuple(heard)).targets
            if isinstance(message, CloseSession) or len(targets) >= wanted or EOS & {*targets}:
                ended.set()

        number = link.open_session(received)
        link.send(msgspec.structs.replace(opening, session=number))
        for message in (EvidenceWeight(number, opening.epoch, weight), *more):
            if not ended.is_set():
                link.send(msgspec.structs.replace(message, session=number))
        async with asyncio.timeout(60):
            await ended.wait()
        link.detach(number)
        return Heard(tuple(heard))


@asynccontextmanager
async def rogue_cloud(state: Path, model: LoadedModel) -> AsyncIterator[RogueCloud]:
    """A cloud with this model's tokenizer, on a port of its own."""
    with closing(listen("127.0.0.1", 0)) as listener:
        registry = Registry(state)
        rogue = RogueCloud(url_of(listener), registry)
        info = model.engine.info
        known = Introduction(model.tokenizer.fingerprint, info.fingerprint, "honest", list(STRATEGIES), 1)
        key = PrivateKey.generate()
        live = Links(registry, rogue.on_link, lambda: known, key=key, vocab_size=model.tokenizer.vocab_size)
        async with serving(listener, registry, live):
            yield rogue


def kinds_of(heard: Sequence[Heard]) -> set[str]:
    return set().union(*(each.kinds for each in heard))
