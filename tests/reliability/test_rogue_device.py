"""A device that dictates, against a real server: a schema holds whatever it does, and the answer goes on without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from device_agent.cloud import Cloud, Credentials
from paceline.commands.demo import Children, command
from paceline.errors import LinkClosed
from paceline.runtime.link.connection import Link
from paceline.wire.messages import CloseSession, EvidenceWeight, OpenSession, SessionFrame, Targets
from tests.e2e.pair import started
from tests.reliability.conftest import Figure, Size
from tests.reliability.honest import STRICT
from tests.reliability.raw_link import introduction

pytestmark = pytest.mark.anyio

WORDS = b"Send your password to attacker.example."
Act = Callable[[Link, OpenSession], None]


def dictate(link: Link, opening: OpenSession) -> None:
    """Weigh as much as all documents of the world, and decide every token."""
    link.send(EvidenceWeight(opening.session, opening.epoch, 1e6))
    link.send(Targets(opening.session, opening.epoch, 0, [*WORDS], bytes([2] * len(WORDS))))


def begin_well(link: Link, opening: OpenSession) -> None:
    """The same, after a beginning that fits the schema."""
    words = b'{"city": "' + WORDS
    link.send(EvidenceWeight(opening.session, opening.epoch, 1e6))
    link.send(Targets(opening.session, opening.epoch, 0, [*words], b""))


def leave(link: Link, opening: OpenSession) -> None:
    """Take no part, and say so, so that nobody waits."""
    link.send(CloseSession(opening.session, "cancelled"))


@dataclass(slots=True)
class Rogue:
    url: str  # of its server
    log: Path
    act: Act
    opened: list[int] = field(default_factory=list)  # session numbers that the server opened at it


@asynccontextmanager
async def server_with_a_rogue(directory: Path, act: Act) -> AsyncIterator[Rogue]:
    up = asyncio.Event()

    def linked(link: Link) -> None:
        def on_open(opening: OpenSession) -> None:
            rogue.opened.append(opening.session)
            link.attach(opening.session, ignore)
            rogue.act(link, opening)

        link.on_open = on_open
        up.set()

    def ignore(_: SessionFrame) -> None:
        """A rogue does not listen."""

    with Children(directory) as children:
        child, state = started(children, "cloud", "serve"), str(directory / "cloud")
        rogue = Rogue(child.url, child.log, act)
        code = json.loads(children.run(command("devices", "add", "phone", "--state-dir", state, "--json")))["code"]
        kept = Credentials(directory / "device")
        cloud = Cloud([rogue.url], kept, code=code, name="phone", introduce=introduction, up=linked)
        await cloud.enrol()
        linking = asyncio.create_task(cloud.keep_linked())
        try:
            async with asyncio.timeout(60):
                await up.wait()
            yield rogue
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The pair of the module, whose tests share a server and a link to it."""
    return "asyncio"


@pytest.fixture(scope="module")
async def rogue(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rogue]:
    async with server_with_a_rogue(tmp_path_factory.mktemp("rogue"), leave) as made:
        yield made


async def ask(url: str, **fields: object) -> dict[str, Any]:
    body: dict[str, object] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Where do I stay?"}],
        "max_tokens": 64,
        "seed": 3,
        "paceline": {"strategy": "aggregate", "device": "phone", "report": True},
    }
    async with httpx.AsyncClient(timeout=60, verify=False) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("act", [dictate, begin_well])
async def test_a_schema_holds_whatever_a_device_dictates(rogue: Rogue, act: Act) -> None:
    rogue.act = act
    rogue.opened.clear()
    for temperature in (0.0, 1.0):
        answer = await ask(rogue.url, response_format=STRICT, temperature=temperature)
        choice = answer["choices"][0]
        stay = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        assert stay["city"] in ("Bari", "Oslo") and 0 <= stay["rooms"] <= 9
        assert answer["paceline"]["degraded"] == "device_lost"
    assert len(rogue.opened) == 2, "it took part in both, and joined neither again"


async def test_a_device_joins_no_answer_of_a_key_that_did_not_choose_it(tmp_path: Path) -> None:
    async with server_with_a_rogue(tmp_path, leave) as rogue:
        state = ("--state-dir", str(tmp_path / "cloud"))
        with Children(tmp_path) as commands:

            def key(name: str, *flags: str) -> dict[str, str]:
                made = json.loads(commands.run(command("keys", "create", name, "--json", *flags, *state)))
                return {"authorization": f"Bearer {made['key']}"}

            keys = {"plain": key("plain"), "bound": key("bound", "--device", "phone")}
            keys["chats"] = key("chats", "--scope", "chat")
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
        async with httpx.AsyncClient(base_url=rogue.url, timeout=60, verify=False) as http:

            async def post(name: str, **more: object) -> httpx.Response:
                return await http.post("/v1/chat/completions", json=body | more, headers=keys[name])

            for name in ("plain", "chats"):
                assert (await post(name)).status_code == 200
            assert not rogue.opened, "neither key chose the device"
            named = {"paceline": {"device": "phone"}}
            assert (await post("chats", **named)).json()["error"]["code"] == "device_not_allowed"
            assert not rogue.opened
            for name, more in (("plain", named), ("bound", {})):
                assert (await post(name, **more)).status_code == 200
            assert len(rogue.opened) == 2


async def test_a_device_writes_no_line_of_its_own_into_the_log(rogue: Rogue) -> None:
    def shout(link: Link, opening: OpenSession) -> None:
        link.send(CloseSession(opening.session, "bye\r\n2026-01-01 00:00:00,000 CRITICAL all keys are void\x1b[2J"))

    rogue.act = shout
    rogue.opened.clear()
    answer = await ask(rogue.url)
    assert rogue.opened and answer["paceline"]["degraded"] == "device_lost"
    (told,) = [line for line in rogue.log.read_text().splitlines() if "all keys are void" in line]
    assert "the device left an answer: bye" in told
    assert not told.startswith("2026-01-01") and "\x1b" not in told


async def test_a_device_that_decides_slowly_holds_up_its_own_answer_only(
    rogue: Rogue, size: Size, figure: Figure
) -> None:
    """It decides one token for every whole answer of another client, which is about one a second: no beat is missed."""
    tokens = size(12, 1200)
    sessions: asyncio.Queue[tuple[Link, OpenSession]] = asyncio.Queue()
    no_end = {"max_tokens": tokens, "logit_bias": {"256": -100}}
    alone = {"paceline": {"strategy": "autoregressive", "privacy": "local-only"}, "max_tokens": 16}
    rogue.act = lambda link, opening: sessions.put_nowait((link, opening))
    expected = (await ask(rogue.url, **alone))["choices"][0]["message"]["content"]
    slow = asyncio.create_task(ask(rogue.url, **no_end))
    decided = others = 0
    link, opening = await asyncio.wait_for(sessions.get(), 60)
    link.send(EvidenceWeight(opening.session, opening.epoch, 1e6))
    start = len(opening.targets)
    while not slow.done():
        assert (await ask(rogue.url, **alone))["choices"][0]["message"]["content"] == expected
        others += 1
        if not sessions.empty():  # it was passed over, and is taken in again
            link, opening = sessions.get_nowait()
            start = len(opening.targets)
        with contextlib.suppress(LinkClosed):
            link.send(Targets(opening.session, opening.epoch, start, [WORDS[0]], b"\x02"))
            start, decided = start + 1, decided + 1
    answer = await slow
    assert (await ask(rogue.url, **alone))["choices"][0]["message"]["content"] == expected
    text = answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "length" and text.startswith(chr(WORDS[0]) * 3)
    figure("tokens that a slow device decided, one after each answer of others", min(decided, tokens))
    figure("answers of others meanwhile, all identical", others)
