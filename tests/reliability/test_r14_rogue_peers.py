"""R14: a device and a cloud with valid keys that send sequences of mutated messages of every type.

A real program is at the other end. It neither crashes nor logs a traceback; an honest client beside it receives its
text unchanged; a strict schema holds in answers that the rogue takes part in; its memory is bounded; the rogue's link
is closed with a code of the protocol, or the message is ignored; and a rogue cloud receives nothing of the marks in
private documents, whatever it asks and answers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil
import pytest

from device_agent.cloud import exchange, http_url
from paceline.commands.demo import Child, Children, command
from paceline.engine.fake import fake_model
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import encode
from paceline.wire.messages import CloseSession, KeyKept, OpenSession, RenewKey
from tests.e2e.pair import started
from tests.reliability.conftest import Figure, Size
from tests.reliability.honest import ALONE, ask_strictly, client_of
from tests.reliability.mutated_drafts import Aim
from tests.reliability.mutated_fields import ANSWERED_BY, FORGED, JOINT
from tests.reliability.mutation import KINDS, Mutator
from tests.reliability.raw_link import RawLink, device_link, introduction, raw_cloud
from tests.reliability.real_server import Honest

pytestmark = pytest.mark.anyio

MIB = 2**20
FAULTY = 0.25  # share of the sequences that end with a frame that cannot be decoded
# 1006: the rogue was still sending when the other end closed, so that the connection broke over the goodbye.
CODES = {*CloseCode, 1006} - {CloseCode.INTERNAL_ERROR, CloseCode.TOO_SLOW, CloseCode.HEARTBEAT_LOST}
_DRAWN = random.Random(30)
MARKS = [_DRAWN.randbytes(8).hex() for _ in range(40)]  # in private documents
SEARCHED = {"privacy": "answer-private", "strategy": "autoregressive"}  # the cloud is asked for passages only
SHINGLE = 8  # bytes, which are tokens of the fake model

Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[object]]


class Campaign:
    """Sequences of a rogue against one program, and what has come of them."""

    def __init__(self, rng: random.Random, relink: Callable[[], Awaitable[RawLink]], ask: Ask) -> None:
        """relink: a new link, which is being read. ask: an honest question in which the rogue takes part."""
        self._rng = rng
        self._relink = relink
        self._ask = ask
        self._mutator = Mutator(rng, vocab_size=fake_model().tokenizer.vocab_size, kinds=KINDS)
        self.link: RawLink | None = None
        self.received: list[bytes] = []
        self.codes: Counter[int] = Counter()
        self.joined = Counter[str]()  # strategies of the sessions of honest answers in which the rogue took part

    async def run(self, sequences: int, url: str, *, kinds: tuple[type, ...]) -> None:
        self._mutator = Mutator(self._rng, vocab_size=fake_model().tokenizer.vocab_size, kinds=kinds)
        async with client_of(url) as http:
            for number in range(sequences):
                if number % 2:
                    await self._within_an_answer(http)
                else:
                    link = await self._linked()
                    aim = Aim(link.number())
                    await self._play(link, aim, self._mutator.legal(OpenSession, aim))
                if self.link is not None and (self.link.draining or self._rng.random() < 0.05):
                    self._leave()
            self._leave()

    async def join(self, strategies: set[str], url: str, *, kinds: tuple[type, ...]) -> None:
        """Take part in answers, each over a new link, until a session of each of these has been opened at the rogue."""
        self._mutator = Mutator(self._rng, vocab_size=fake_model().tokenizer.vocab_size, kinds=kinds)
        async with client_of(url) as http, asyncio.timeout(120):
            while not strategies <= {*self.joined}:
                await self._within_an_answer(http)
                self._leave()

    async def _linked(self) -> RawLink:
        if self.link is None or self.link.closed.is_set():
            self._leave()
            self.link = await self._relink()
        return self.link

    def _leave(self) -> None:
        if self.link is not None:
            self.received += self.link.received
            if self.link.close_code is not None:
                self.codes[self.link.close_code] += 1
            self.link.abort()
            self.link = None

    async def _within_an_answer(self, http: httpx.AsyncClient) -> None:
        """Take part in the answer of an honest client, and again when it is opened again over a new link."""
        link = await self._linked()
        while not link.opened.empty():
            link.opened.get_nowait()
        asking = asyncio.ensure_future(self._ask(http, self._rng))
        while (opening := await self._opening(asking)) is not None:
            assert self.link is not None
            awaits = ANSWERED_BY.get(opening.strategy)
            await self._play(self.link, Aim(opening.session, opening.epoch, len(opening.targets), awaits=awaits))
            self.joined[opening.strategy] += 1
        await asking

    async def _opening(self, asking: asyncio.Future[object]) -> OpenSession | None:
        """The next session that the other end opens, over whichever link; None once the answer is complete."""
        while not asking.done():
            linking = asyncio.ensure_future(self._linked())
            await asyncio.wait([asking, linking], return_when=asyncio.FIRST_COMPLETED)
            if not linking.done():
                linking.cancel()
                await asyncio.gather(linking, return_exceptions=True)
                return None
            link = linking.result()
            opened, gone = asyncio.ensure_future(link.opened.get()), asyncio.ensure_future(link.closed.wait())
            await asyncio.wait([asking, opened, gone], return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if opened.done():
                return opened.result()
            opened.cancel()
        return None

    async def _play(self, link: RawLink, aim: Aim, *before: bytes) -> None:
        frames = self._mutator.sequence(aim, faulty=self._rng.random() < FAULTY)
        await link.send(*before, *frames)
        await link.settled()
        await link.send(encode(CloseSession(aim.session, "cancelled")))
        await link.settled()


async def quiet(url: str) -> Honest:
    """The text that an honest client reads, and how fast, beside one other honest client."""
    with Honest(url, more={"paceline": ALONE}) as honest:
        async with client_of(url) as http:
            for _ in range(8):
                await ask_strictly(http, ALONE)
    assert not honest.mistakes
    return honest


def memory(child: Child) -> int:
    """Bytes."""
    return int(psutil.Process(child.process.pid).memory_info().rss)


def unharmed(children: Children, child: Child) -> str:
    """Its log. It runs, no exception has reached it, and no text of a peer stands in a line of its own."""
    children.check()
    log = child.log.read_text("utf-8", "replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]
    assert f"\n{FORGED}" not in log
    return log


async def test_a_device_that_sends_mutated_messages_harms_neither_the_server_nor_an_answer(
    tmp_path: Path, rng: random.Random, size: Size, figure: Figure
) -> None:
    with Children(tmp_path) as children:
        server, state = started(children, "cloud", "serve"), str(tmp_path / "cloud")
        code = json.loads(children.run(command("devices", "add", "phone", "--state-dir", state, "--json")))["code"]
        credential = await exchange(http_url(server.url), code)

        async def ask(http: httpx.AsyncClient, rng: random.Random) -> object:
            paceline = {"device": "phone", "privacy": rng.choice(("open", "document-private"))}
            paceline["strategy"] = rng.choice(JOINT)
            return await ask_strictly(http, paceline, temperature=rng.choice((0.0, 1.0)))

        async def relink() -> RawLink:
            link = await device_link(server.url, credential)
            reading.add(task := asyncio.create_task(link.run()))
            task.add_done_callback(reading.discard)
            return link

        reading = set[asyncio.Task[None]]()
        campaign = Campaign(rng, relink, ask)
        calm = await quiet(server.url)
        await campaign.run(size(8, 300), server.url, kinds=KINDS)  # caches and pools are filled
        before = memory(server)
        sequences = size(32, 2000)
        with Honest(server.url, more=calm.more, text=calm.text) as honest:
            await campaign.run(sequences, server.url, kinds=KINDS)
        assert not honest.mistakes
        unharmed(children, server)
        assert set(campaign.codes) <= CODES, campaign.codes
        assert campaign.joined.total() > sequences // 4
        figure("sequences of a rogue device", sequences)
        figure("honest streams beside it, all identical", len(honest.firsts))
        figure("p95 gap of the honest stream", honest.p95 / calm.p95, at_most=1.5, unit="x quiet")
        figure("growth of the server's memory", (memory(server) - before) / MIB, at_most=10, unit="MiB")


async def test_a_cloud_that_sends_mutated_messages_harms_no_agent_and_learns_no_mark(
    tmp_path: Path, rng: random.Random, size: Size, figure: Figure
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    for number, mark in enumerate(MARKS):
        (notes / f"{number}.md").write_text(f"Where do I stay? Where is my boat? {mark}\n")
    with Children(tmp_path) as children:
        async with raw_cloud(tmp_path / "rogue", introduction()) as (url, registry, live):
            store = ("--store", str(tmp_path / "device" / "docs"), "--embedder", "hash")
            children.run(command("docs", "add", str(notes), "--side", "device", *store))
            flags = ["--embedder", "hash", "--cloud", url, "--code", registry.add("laptop"), "--cloud-may-ask", "on"]
            flags += ["--cloud-asks-per-minute", "0", "--cloud-asks-per-hour", "0"]
            # On a thread: it enrols at this very process.
            agent = await asyncio.to_thread(started, children, "device", "agent", *flags)

            async def relink() -> RawLink:
                async with asyncio.timeout(60):
                    link = await live.links.get()
                    while link.closed.is_set():
                        link = await live.links.get()
                return link

            async def ask(http: httpx.AsyncClient, rng: random.Random) -> object:
                joint = {"privacy": "document-private", "strategy": rng.choice(JOINT)}
                advanced = joint | {"workflow": "advanced"}
                # A cloud that did not write a text is asked for none for a while: it is asked for one before all else.
                asked = {*ANSWERED_BY} <= {*campaign.joined}
                paceline = rng.choice((*[joint] * 3, SEARCHED, advanced)) if asked else advanced
                return await ask_strictly(http, paceline, temperature=rng.choice((0.0, 1.0)))

            campaign = Campaign(rng, relink, ask)
            calm = await quiet(agent.url)
            kinds = tuple(kind for kind in KINDS if kind is not KeyKept)  # a wrong one ends the link for good: last
            async with client_of(agent.url) as http:  # what a text takes here is known: it is tried there
                await ask_strictly(http, ALONE | {"workflow": "advanced"})
            await campaign.join({*ANSWERED_BY}, agent.url, kinds=kinds)
            await campaign.run(size(8, 300), agent.url, kinds=kinds)
            before = memory(agent)
            sequences = size(32, 2000)
            with Honest(agent.url, more=calm.more, text=calm.text) as honest:
                await campaign.run(sequences, agent.url, kinds=kinds)
            assert not honest.mistakes
            growth = memory(agent) - before

            link = await relink()
            await _renew_falsely(link)
            assert link.close_code == CloseCode.SERVER_KEY_CHANGED
            unharmed(children, agent)
    assert set(campaign.codes) <= CODES, campaign.codes
    assert campaign.joined.total() > sequences // 8
    heard = [*campaign.received, *link.received]
    for mark in MARKS:
        shingles = {mark[start : start + SHINGLE].encode() for start in range(len(mark) - SHINGLE + 1)}
        assert not [frame for frame in heard if any(shingle in frame for shingle in shingles)], "a private mark"
    figure("sequences of a rogue cloud", sequences)
    for opened, count in sorted(campaign.joined.items()):
        figure(f"sessions {opened} that an agent opened at it", count)
    figure("frames that it received, none with a mark", len(heard))
    figure("p95 gap of the honest stream at the device", honest.p95 / calm.p95, at_most=1.5, unit="x quiet")
    figure("growth of the agent's memory", growth / MIB, at_most=10, unit="MiB")


async def _renew_falsely(link: RawLink) -> None:
    """Have a key made, and confirm it with a signature of nobody's."""
    await link.send(encode(RenewKey()))
    async with asyncio.timeout(60):
        while not link.new_keys:
            await link.settled()
        await link.send(encode(KeyKept(bytes(64))))
        await link.closed.wait()
