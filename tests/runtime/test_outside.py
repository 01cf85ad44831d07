"""A stranger's endpoint over real sockets: what reaches it at each level, byte for byte, and what it may do to us."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.bootstrap import open_outside
from paceline.commands.diagnosis import outside
from paceline.core.policy import DocumentRule, Grant, Pattern, Policy
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.errors import ConfigError, EndpointError, RequestError
from paceline.runtime import endpoint as endpoint_module
from paceline.runtime.endpoint import OutsideEndpoint
from paceline.runtime.node import Node
from paceline.runtime.policy import PolicyGuard
from paceline.runtime.resources import Company, NodeParts
from paceline.runtime.service import GenerateRequest, GenerationResult
from paceline.runtime.units import ENGINE, OUTSIDE
from paceline.runtime.workflows.agent_text import CloudUnits
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.run import Tools
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings
from paceline.settings_sources import describe, describe_given, resolve
from paceline.strategies.base import SIDES, Side
from paceline.workflow.profiles import WINDOW
from tests.requests import SAMPLING, a_request, changed
from tests.runtime.test_node import Bench, collect, open_gate, side_by_side, stores_of

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
LIMITS = {"CONNECT_S": 2.0, "SILENT_S": 0.5, "TOTAL_S": 5.0, "BODY_BYTES": 1 << 16, "LINE_BYTES": 1 << 14}
CONVERSATION = (
    {"role": "system", "content": "You help Anna Berg of Kassel."},
    {"role": "user", "content": "What does my diary say?"},
    {"role": "assistant", "content": "It says plughed, as Doktor Grünewald knows."},
    {"role": "user", "content": "Where may Anna Berg, phone 0170 5550123, have left the garden key of the museum?"},
)
ASKED = a_request(messages=CONVERSATION, max_tokens=40, strategy="outside", documents=2)
PRIVATE = ("Anna", "Berg", "0170", "5550123", "Grünewald", "XYZZY", KEY.removeprefix("sk-"))
Script = Callable[["Stranger", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


def event(text: str | None = None, end: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": end}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nSet-Cookie: who=you\r\nConnection: close\r\n\r\n"


async def polite(stranger: Stranger, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Says again what it was asked, a few characters at a time."""
    said = f"Ask {stranger.mention(body)}: PERSON_1's key, not [PERSON_77]."
    writer.write(OK + b": ping\n\n" + event())
    for at in range(0, len(said), 3):
        writer.write(event(said[at : at + 3]))
        await writer.drain()
    writer.write(event(end="stop") + b"data: [DONE]\n\n")


@dataclass(eq=False)
class Stranger:
    """Keeps all bytes of all connections."""

    script: Script = polite
    heard: bytearray = field(default_factory=bytearray)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    closed: int = 0

    @staticmethod
    def mention(body: dict[str, Any]) -> str:
        return str(body["messages"][-1]["content"])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
            )
            content = await reader.readexactly(length)
            self.heard += head.replace(f"Bearer {KEY}".encode(), b"Bearer") + content
            assert f"Bearer {KEY}".encode() in head
            self.bodies.append(json.loads(content or b"{}"))
            await self.script(self, writer, self.bodies[-1])
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()


@dataclass
class Rig:
    bench: Bench
    stranger: Stranger

    @property
    def device(self) -> Node:
        return self.bench.device

    async def ask(self, request: GenerateRequest = ASKED) -> tuple[str, GenerationResult]:
        return await collect(await self.device.prepare(request))


@pytest.fixture(autouse=True)
def less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than usual is enough for an answer."""
    for name, limit in LIMITS.items():
        monkeypatch.setattr(endpoint_module, name, limit)


@asynccontextmanager
async def rig(
    folder: Path, script: Script = polite, *, linked: bool = True, policy: Policy | None = None, at: Side = "device"
) -> AsyncIterator[Rig]:
    """A device with a private document, a cloud with a public one, and a stranger whom one of them may ask."""
    stranger = Stranger(script)
    server = await asyncio.start_server(stranger.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    stranger.url = f"http://127.0.0.1:{port}/v1"
    endpoint = OutsideEndpoint(stranger.url, "their-model", KEY)
    texts = {"device": "The garden key is with XYZZY.", "cloud": "Anna Berg keeps the museum garden and its key."}
    with stores_of(folder, {side: {"note.md": texts[side]} for side in SIDES}) as stores:

        def node(side: Side) -> Node:
            guard = None if policy is None else PolicyGuard(side, policy, names=str)
            company = Company(asks=open_gate(), policy=guard, outside=endpoint if side == at else None)
            model = LoadedModel(FakeEngine(seed=1 + SIDES.index(side), spread=0.3), ByteTokenizer())
            return Node(side, model, stores[side], NodeParts(company=company), Tools())

        bench = Bench(node("cloud"), node("device"))
        async with server, side_by_side(bench, linked=linked):
            yield Rig(bench, stranger)


@pytest.mark.parametrize("level", ["open", "document-private", "answer-private"])
async def test_nothing_private_reaches_the_stranger_and_the_names_come_back(level: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        said, done = await made.ask(changed(ASKED, privacy=level, min_score=-1.0))
        (body,), heard = made.stranger.bodies, bytes(made.stranger.heard)
        for word in PRIVATE:
            assert word.encode() not in heard, word
            assert json.dumps(word)[1:-1].encode() not in heard, word
        is_open = level == "open"
        for word in ("plughed", "diary", "museum garden"):  # the conversation, and the cloud's passage
            assert (word.encode() in heard) == is_open, word
        question = CONVERSATION[-1]["content"]
        assert said == f"Ask {question}: Anna Berg's key, not [PERSON_77]."
        assert body["model"] == "their-model" and body["messages"][-1]["role"] == "user"
        assert b"cookie" not in heard.lower()
        assert (done.strategy, done.degraded, done.reason) == ("outside", None, "stop")
        assert "their-model at 127.0.0.1" in done.strategy_reason
        size = len(json.dumps(body, ensure_ascii=False).encode())
        assert done.stats["sent_outside_bytes"] == size and done.stats["received_outside_bytes"] > 100
        assert done.stats["redactions"] == (4 if is_open else 2)
        hours = made.device.load().sent_today.values()
        assert sum(kinds.get("outside", 0) for kinds in hours) == size
        assert [each.side for each in done.citations] == (["cloud"] if is_open else [])
        assert ("sent_open_bytes" in done.stats) == is_open  # its own cloud was searched
        assert done.completion_tokens == len(said.encode())
        await made.ask(changed(ASKED, privacy=level))
        assert b"cookie" not in bytes(made.stranger.heard).lower()


async def test_what_may_not_go_there_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        for change in (
            {"privacy": "local-only"},
            {"top_logprobs": 2},
            {"stop_token_ids": (3,)},
            {"messages": ({"role": "user", "content": "x" * (1 << 20 | 1)},)},
            {"workflow": "advanced"},  # at document-private
        ):
            with pytest.raises(RequestError):
                await made.device.prepare(changed(ASKED, **change))
        with pytest.raises(RequestError):
            await made.bench.cloud.prepare(ASKED)  # it has no endpoint
        assert not made.stranger.heard and "outside" not in made.bench.cloud.strategies()
        assert made.device._places._shares.taken == 0


async def test_the_owner_s_rules_hold_towards_a_stranger(tmp_path: Path) -> None:
    policy = Policy(budgets={"cloud_tokens": 100.0}, keys={"phone": Grant("key phone", privacy="answer-private")})
    said = "The doctor says that the knee needs an operation next spring, and that it will not heal alone."
    async with rig(tmp_path, policy=policy) as made:
        guard = made.device._resources.guard
        _, done = await made.ask(changed(ASKED, privacy="open", owner="phone"))
        assert done.policy is not None and done.policy.level == "answer-private"
        assert b"plughed" not in made.stranger.heard and guard.left()["cloud_tokens"] < 100.0
        guard.remember(said, "local-only")
        told = ({"role": "user", "content": f"Shorten this: {said}"},)
        sent = len(made.stranger.heard)
        for request in (changed(ASKED, messages=told), ASKED):  # the second when the budget is used up
            with pytest.raises(RequestError) as refused:
                await made.device.prepare(request)
            assert (refused.value.status, refused.value.code) == (403, "policy_forbids")
            guard.spend("cloud_tokens", 100.0)
        assert len(made.stranger.heard) == sent and made.device._places._shares.taken == 0


async def silent(_: Stranger, writer: asyncio.StreamWriter, __: dict[str, Any]) -> None:
    writer.write(OK + event("Ask"))
    for _ in range(100):
        writer.write(b": still here\n\n" + event())  # which is no text
        await writer.drain()
        await asyncio.sleep(0.1)


async def endless(_: Stranger, writer: asyncio.StreamWriter, __: dict[str, Any]) -> None:
    writer.write(OK)
    for _ in range(1 << 20):
        writer.write(b": " + b"x" * 1022 + b"\n")
        await writer.drain()


async def one_line(_: Stranger, writer: asyncio.StreamWriter, __: dict[str, Any]) -> None:
    writer.write(OK + b"data: ")
    for _ in range(1 << 20):
        writer.write(b"x" * 1024)
        await writer.drain()


def answers(data: bytes) -> Script:
    async def script(_: Stranger, writer: asyncio.StreamWriter, __: dict[str, Any]) -> None:
        writer.write(data)

    return script


def status(line: str, words: str = "no") -> Script:
    return answers(f"HTTP/1.1 {line}\r\nContent-Length: {len(words)}\r\n\r\n{words}".encode())


HOSTILE = {
    "silent": silent,
    "endless": endless,
    "one line": one_line,
    "no JSON": answers(OK + b"data: {oops\n\n"),
    "no object": answers(OK + b"data: [1]\n\n"),
    "deep": answers(OK + b"data: " + b"[" * 15_000 + b"\n\n"),
    "wrong types": answers(OK + b'data: {"choices": [{"delta": {"content": 7}}]}\n\n'),
    "an error": answers(OK + event("Ask") + b'data: {"error": {"message": "out of credit"}}\n\n'),
    "cut": answers(OK + event("Ask")),
    "empty": answers(OK + event(end="stop") + b"data: [DONE]\n\n"),
    "no HTTP": answers(b"SSH-2.0\r\n\r\n"),
    "redirect": status("302 Found\r\nLocation: http://127.0.0.1:1/"),
    "401": status("401 Unauthorized", f"the key {KEY} is wrong"),
    "429": status("429 Too Many Requests"),
    "500": status("500 Oops", "x" * 100_000),
}


@pytest.mark.parametrize("fault", HOSTILE)
async def test_whatever_the_stranger_does_the_answer_goes_on_here_and_says_so(fault: str, tmp_path: Path) -> None:
    async with rig(tmp_path, HOSTILE[fault]) as made:
        request = changed(ASKED, privacy="answer-private", documents=0)
        said, done = await made.ask(request)
        begun = fault in ("silent", "an error", "cut")
        assert (done.degraded, done.strategy) == ("outside_lost", "lookup_tree")
        assert said.startswith("Ask") == begun and done.completion_tokens > 3
        assert "their-model at 127.0.0.1" in done.strategy_reason and KEY not in done.strategy_reason
        assert done.stats["sent_outside_bytes"] > 100
        with pytest.raises(RequestError) as refused:
            await made.ask(changed(request, on_loss="fail"))
        assert refused.value.code == "outside_lost" and refused.value.status == (429 if fault == "429" else 503)
        assert KEY not in str(refused.value)
        assert made.device._places._shares.taken == 0


async def test_the_text_goes_on_where_the_stranger_has_left_it(tmp_path: Path) -> None:
    """What this side writes is what it writes behind the same beginning of the assistant's."""
    async with rig(tmp_path, answers(OK + event("It is with [PERSON_1"))) as made:
        request = changed(ASKED, privacy="answer-private", documents=0, max_tokens=60)
        question = {"role": "user", "content": "Where is Anna Berg?"}
        said, _ = await made.ask(changed(request, messages=(question,)))
        begun = {"role": "assistant", "content": "It is with [Anna Berg"}
        alone = changed(
            request, messages=(question, begun), strategy="lookup_tree", max_tokens=60 - len(begun["content"])
        )
        rest, _ = await made.ask(alone)
        assert said == begun["content"] + rest
        across = begun["content"][-2:] + rest[:2]
        said, done = await made.ask(changed(request, messages=(question,), stop=(across,)))
        assert (said, done.stop, done.degraded) == (begun["content"][:-2], across, "outside_lost")


async def test_a_placeholder_cut_by_the_end_is_whole_and_stop_strings_are_of_the_names_that_come_back(
    tmp_path: Path,
) -> None:
    script = answers(OK + event("Ask [PERS") + event("ON_1] at home") + event(end="length"))
    async with rig(tmp_path, script) as made:
        said, done = await made.ask()
        assert (said, done.reason) == ("Ask Anna Berg at home", "length")
        said, done = await made.ask(changed(ASKED, stop=("Berg",)))
        assert (said, done.stop, done.reason) == ("Ask Anna ", "Berg", "stop")


async def test_a_workflow_s_public_texts_are_the_stranger_s_and_private_ones_are_not(tmp_path: Path) -> None:
    async def agent(_: Stranger, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        rewrites = "Split the question" in str(body["messages"])
        said = "Where does [PERSON_1] keep keys?\n" if rewrites else "With [PERSON_1] [1]."
        writer.write(OK + event(said) + event(end="stop"))

    async with rig(tmp_path, agent) as made:
        workflows = made.device._workflows
        workflows._driver = driver = WorkflowDriver(made.device._resources.units)
        for phase in ("prefill", "decode"):
            for _ in range(WINDOW):
                driver.profiles.learn(f"agent/{phase}", OUTSIDE, 4, 0.01)
                driver.profiles.learn(f"agent/{phase}", ENGINE, 4, 1.0)
        workflows._cloud = CloudUnits(driver)
        workflows._strangers = strangers = CloudUnits(driver, OUTSIDE)
        assert made.device.outside is not None
        strangers._link, strangers._forgets = made.device.outside.endpoint, float("inf")  # what it takes is known
        request = changed(ASKED, privacy="open", workflow="advanced", min_score=-1.0, messages=CONVERSATION[3:])
        said, done = await made.ask(request)
        assert said == "With Anna Berg [1]." and done.degraded is None
        heard = bytes(made.stranger.heard)
        assert not [word for word in PRIVATE if word.encode() in heard]
        units = {step.stage: step.unit.split()[0] for step in done.steps if step.unit}
        assert units["rewrite"] == units["refine public"] == "outside" and units["refine"] == "engine"
        assert b"museum garden" in heard
        assert done.stats["sent_outside_bytes"] == sum(
            len(json.dumps(body, ensure_ascii=False).encode()) for body in made.stranger.bodies
        )
        strangers.rest("it is down")  # texts are written here, and those that the answer's writer is told are apart
        _, done = await made.ask(request)
        units = {step.stage: step.unit.split()[0] for step in done.steps if step.unit}
        assert units["refine public"] == units["refine"] == "engine"


async def test_a_workflow_at_the_cloud_tells_a_stranger_no_document_with_a_rule_even_when_it_is_confirmed(
    tmp_path: Path,
) -> None:
    rule = DocumentRule("ask me", Pattern.parse("note.md", "/home"))
    request = changed(ASKED, privacy="open", workflow="fast", min_score=-1.0)
    for policy, told in ((Policy((rule,)), False), (Policy(budgets={"bytes": 1e9}), True)):
        async with rig(tmp_path / str(told), policy=policy, at="cloud") as made:
            cloud = made.bench.cloud
            guard = cloud._resources.guard
            readable = cloud._resources.readable("")
            assert readable is not None
            if policy.rules:
                guard.state.confirm(*readable.documents())
            _, done = await collect(await cloud.prepare(request))
            assert done.strategy == OUTSIDE
            assert (b"museum garden" in made.stranger.heard) == told


async def test_a_client_of_the_api_asks_for_it_by_name(tmp_path: Path) -> None:
    async with rig(tmp_path) as made:
        app = create_app(made.device, keyring=Keyring({}))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            asked = {"model": "fake", "messages": CONVERSATION[3:], "paceline": {"strategy": "outside", "report": True}}
            answer = (await client.post("/v1/chat/completions", json=asked)).json()
            assert "Anna Berg, phone 0170 5550123" in answer["choices"][0]["message"]["content"]
            assert answer["paceline"]["strategy"] == "outside" and answer["paceline"]["stats"]["redactions"] == 2
            tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
            for more in ({"tools": [tool]}, {"logprobs": True}, {"response_format": {"type": "json_object"}}):
                refused = await client.post("/v1/chat/completions", json=asked | more)
                assert refused.status_code == 400 and "plain text" in refused.json()["error"]["message"], more
            assert "outside" in (await client.get("/v1/models")).json()["data"][0]["paceline"]["strategies"]
    assert len(made.stranger.bodies) == 1


async def test_looking_at_the_endpoint_tells_it_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, status("200 OK", '{"data": [{"id": "their-model"}]}')) as made:
        assert made.device.outside is not None
        endpoint = made.device.outside.endpoint
        assert await endpoint.look() == "their-model at 127.0.0.1 answers"
        made.stranger.script = status("401 No", f"bad {KEY}")
        with pytest.raises(EndpointError, match=r"does not accept the key: bad \(key\)"):
            await endpoint.look()
        assert bytes(made.stranger.heard).startswith(b"GET /v1/models HTTP/1.1\r\n")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            gone = OutsideEndpoint(f"http://127.0.0.1:{free.getsockname()[1]}", "m")
            with pytest.raises(EndpointError, match="cannot be reached"):
                await gone.look()
            await gone.close()


# ---- settings: encrypted, its key never on a command line nor shown -------------------------------------------------
URL = "https://api.example.com/v1"
GIVEN = {"PACELINE_OUTSIDE_URL": URL, "PACELINE_OUTSIDE_MODEL": "m", "PACELINE_OUTSIDE_KEY": KEY}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_variables_set_it_on_both_sides_and_nothing_shows_the_key(schema: type[NodeSettings]) -> None:
    settings, origins = resolve(schema, {}, GIVEN)
    endpoint = open_outside(settings)
    assert endpoint is not None and endpoint.name == "m at api.example.com"
    shown = [repr(settings), *describe(settings, origins), describe_given(settings, origins)]
    assert not any(KEY in text for text in shown) and any("outside.key" in text for text in shown)
    assert open_outside(schema()) is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"URL": "http://api.example.com/v1"}, "https URL"),
        ({"URL": "http://10.0.0.1/v1"}, "https URL"),
        ({"URL": "https://me:secret@api.example.com"}, "https URL"),
        ({"URL": "https://api.example.com/v1?key=1"}, "https URL"),
        ({"URL": "ftp://127.0.0.1"}, "https URL"),
        ({"MODEL": ""}, "belong together"),
        ({"KEY": "sk-1\nX: y"}, "ASCII"),
        ({"KEY": "sk-schlüssel"}, "ASCII"),
    ],
)
def test_what_would_be_read_on_the_way_or_is_not_whole_is_refused(given: dict[str, str], sentence: str) -> None:
    changed = GIVEN | {f"PACELINE_OUTSIDE_{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError, match=sentence) as refused:
        resolve(AgentSettings, {}, changed)
    assert "secret" not in str(refused.value), "a password of a URL that is refused"


def test_this_machine_may_be_asked_without_encryption() -> None:
    for host in ("127.0.0.1:8080", "localhost", "[::1]:1"):
        assert open_outside(resolve(AgentSettings, {}, GIVEN | {"PACELINE_OUTSIDE_URL": f"http://{host}"})[0])


def test_a_flag_for_the_key_is_refused_and_a_file_that_others_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="PACELINE_OUTSIDE_KEY"):
        resolve(AgentSettings, {"outside_key": KEY}, {})
    for table in ("[outside]", "[agent.outside]"):
        file = tmp_path / "paceline.toml"
        file.write_text(f"{table}\nurl = '{URL}'\nmodel = 'm'\nkey = '{KEY}'\n")
        file.chmod(0o644)
        with caplog.at_level(logging.WARNING):
            assert resolve(AgentSettings, {}, {}, file)[0].outside.key == KEY
        assert "has outside.key and can be read by others" in caplog.text
        caplog.clear()


def test_doctor_asks_the_endpoint() -> None:
    settings = resolve(AgentSettings, {}, GIVEN | {"PACELINE_OUTSIDE_URL": "http://127.0.0.1:9/v1"})[0]
    with pytest.raises(EndpointError, match=r"m at 127\.0\.0\.1 cannot be reached"):
        outside(settings)


@types.coroutine
def cancelled_at(step: int, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
    """Do the work in the current task, which is cancelled as it waits for the n-th time. step: n, from 1."""
    awaiting = work.__await__()
    go_on = partial(next, awaiting)
    for waited in itertools.count(1):
        try:
            future = go_on()
        except StopIteration:
            return
        if waited == step:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield future
            go_on = partial(next, awaiting)
        except asyncio.CancelledError as cancelled:
            go_on = partial(awaiting.throw, cancelled)


async def test_a_reader_that_is_cancelled_at_any_step_leaves_no_connection() -> None:
    server = await asyncio.start_server(Stranger().serve, "127.0.0.1", 0)
    endpoint = OutsideEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "their-model", KEY)
    told = [{"role": "user", "content": "Where?"}]

    async def read() -> None:
        async for _ in endpoint.stream(told, SAMPLING, 9, lambda _sent, _received: None):
            pass

    async def active() -> list[str]:
        """Connections that are still in use once what goes on has gone on."""
        for _ in range(20):
            await asyncio.sleep(0.0)
        pool: Any = endpoint._transport._pool
        return [info for each in pool.connections if "ACTIVE" in (info := each.info())]

    async with server:
        for step in range(1, 200):
            task = asyncio.create_task(cancelled_at(step, read()))
            await asyncio.wait({task})
            assert await active() == [], step
            if not task.cancelled():
                task.result()
                break
        await endpoint.close()
    assert 5 < step < 199
