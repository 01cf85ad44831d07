"""A service that follows a script, and a real server around it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring, StoredKey
from paceline.api.http.routing import Settings
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.core.policy import Decision
from paceline.core.sampling.sampler import SamplingDefaults
from paceline.engine.base import ModelInfo
from paceline.errors import RequestError
from paceline.rag.store.library import Library
from paceline.runtime.service import (
    EmbedderInfo,
    Explanation,
    GenerateEvent,
    GenerateRequest,
    Generation,
    GenerationResult,
    LinkStatus,
    Load,
    ModelStatus,
    Readiness,
    Reranked,
    TextDelta,
)
from paceline.strategies.base import Side
from paceline.workflow.flows import WORKFLOWS, WorkflowName

T = TypeVar("T")
MODEL = ModelInfo("scripted", "f" * 64, 256, 4096, "float32", "fake")
EMBEDDER = EmbedderInfo("scripted-embedder", 4, 256)
WAIT = 30.0  # s that a test waits for an event that should come at once


class Signal:
    """Set in one thread, awaited in the event loop of another."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            self._set.set()
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)

    async def reached(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._set.is_set():
                return
            self._waiters.append((asyncio.get_running_loop(), event))
        await event.wait()

    def wait(self) -> bool:
        return self._set.wait(WAIT)


@dataclass
class Script:
    """The behaviour of the next generations. Steps are events, signals to wait for, and errors to raise."""

    steps: Sequence[GenerateEvent | Signal | Exception] = ()
    refusal: Exception | None = None  # raised by prepare
    hold: Signal | None = None  # awaited by prepare
    began: Signal = field(default_factory=Signal)  # run was entered
    ended: Signal = field(default_factory=Signal)  # a run has ended, one way or another
    closed: Signal = field(default_factory=Signal)  # a prepared request was closed without having run
    cancelled: Signal = field(default_factory=Signal)  # prepare was cancelled


def done(reason: str = "stop", **fields: object) -> GenerationResult:
    base: dict[str, object] = {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "strategy": "aggregate",
        "strategy_reason": "both read.",
    }
    return GenerationResult(reason, **(base | fields))  # type: ignore[arg-type]  # a test's shorthand


def answering(*texts: str, **fields: object) -> list[GenerateEvent]:
    return [*(TextDelta(text, 1) for text in texts), done("stop", **fields)]


class FreshKeys:
    """A store of keys that is waited for as the event loop waits: nothing on it may ask otherwise."""

    def __init__(self, *keys: StoredKey) -> None:
        self.keys = keys
        self.fault: Exception | None = None

    def __call__(self) -> Sequence[StoredKey]:
        raise AssertionError("the event loop stands still for the keys")

    async def fresh(self) -> Sequence[StoredKey]:
        if self.fault is not None:
            raise self.fault
        return self.keys


class ScriptedPrepared:
    def __init__(self, script: Script, request: GenerateRequest) -> None:
        self._script = script
        self._request = request

    @property
    def prompt_tokens(self) -> int:
        return 7

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        self._script.began.set()
        try:
            for step in self._script.steps:
                if isinstance(step, Signal):
                    await step.reached()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            self._script.ended.set()

    async def aclose(self) -> None:
        self._script.closed.set()


class ScriptedService:
    """A service that follows `script`, which a test replaces, and records every request it admits."""

    def __init__(self, side: Side = "cloud") -> None:
        self.side: Side = side
        self.library: Library | None = None
        self.script = Script(answering("Hello", " there", "."))
        self.requests: list[GenerateRequest] = []
        self.forgotten: list[str] = []  # owners whose answers were
        self.is_ready = True
        self.debug_options = False
        self.aliases: dict[str, str] = {}
        self.refuse_after: int | None = None

    def models(self) -> Sequence[ModelInfo]:
        recommended = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
        return (MODEL, ModelInfo("org/second", "e" * 64, 256, 4096, "float32", "fake", recommended))

    def model_status(self, name: str) -> ModelStatus:
        return ModelStatus("loaded" if name == MODEL.name else "unloaded", is_joint=name == MODEL.name)

    def embedders(self) -> Sequence[EmbedderInfo]:
        return (EMBEDDER,)

    def strategies(self) -> Sequence[str]:
        return ("autoregressive", "aggregate")

    def workflows(self) -> Sequence[WorkflowName]:
        return WORKFLOWS

    async def wait_for_room(self, owner: str) -> None:
        """There is room for everybody."""

    async def forget_answers(self, owner: str) -> None:
        self.forgotten.append(owner)

    async def explain(self, request: GenerateRequest, key: str | None) -> Explanation:  # noqa: ARG002
        return Explanation(Decision(request.wish.privacy), "autoregressive", "It is asked for.", "nothing", [], {})

    async def confirm(self, owner: str, document: str) -> str:  # noqa: ARG002
        raise RequestError("There is no such document.", status=404, code="not_found", param="document")

    def rerankers(self) -> Sequence[str]:
        return ("scripted-reranker",)

    async def rerank(self, query: str, passages: Sequence[str], owner: str) -> Reranked:  # noqa: ARG002
        """Words that query and passage have in common, of all of the query's."""
        words = set(query.split())
        shared = tuple(len(words & set(passage.split())) / len(words) for passage in passages)
        return Reranked(shared, sum(len(text.split()) for text in (query, *passages)))

    @asynccontextmanager
    async def of(self, model: str) -> AsyncIterator[ScriptedService]:  # noqa: ARG002
        yield self

    async def tokenize_chat(self, messages: Sequence[Mapping[str, str]], owner: str) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(byte for message in messages for byte in message["content"].encode())

    async def find(self, work: Callable[[], T], owner: str) -> T:  # noqa: ARG002
        return await asyncio.to_thread(work)

    async def prepare(self, request: GenerateRequest) -> Generation:
        script = self.script
        try:
            if script.hold is not None:
                script.began.set()
                await script.hold.reached()
        except asyncio.CancelledError:
            script.cancelled.set()
            raise
        if script.refusal is not None:
            raise script.refusal
        if self.refuse_after is not None and len(self.requests) >= self.refuse_after:
            raise RequestError("Too much to do.", status=429, type="rate_limit_error", code="busy")
        self.requests.append(request)
        return ScriptedPrepared(script, request)

    def readiness(self) -> Readiness:
        detail: Mapping[str, str | int | bool] = {"model": MODEL.name, "documents": 0}
        return Readiness(self.is_ready, detail)

    def load(self) -> Load:
        return Load(answers=2, steps=3, rows=50, cached_rows=7, preemptions=4, kv_rows=160, kv_free_rows=96)

    def links(self) -> tuple[LinkStatus, ...]:
        return (LinkStatus("laptop", 0.02, None, {"draft": 120, "target": 30}),)


@contextmanager
def running(
    app: FastAPI, around: AbstractAsyncContextManager[object] | None = None, listener: socket.socket | None = None
) -> Iterator[str]:
    """The URL of a real server for `app`, on a thread and loop of its own, drained at the end.

    `around`: a context that is entered in that loop before, such as a node.
    """
    listener = listener or listen("127.0.0.1", 0)
    ready = threading.Event()
    server = HttpServer(app, ready.set)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with around or nullcontext():
            await server.serve([listener])

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, daemon=True)
    url = url_of(listener)
    thread.start()
    try:
        assert ready.wait(WAIT)
        yield url
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(WAIT)
        assert not thread.is_alive()


@contextmanager
def serving(service: ScriptedService, keys: Mapping[str, str | None] | None = None, **options: object) -> Iterator[str]:
    """options: of `create_app` or its `Settings`."""
    make, settings = cast(Callable[..., FastAPI], create_app), cast(Callable[..., Settings], Settings)
    of_settings = {field.name: options.pop(field.name) for field in fields(Settings) if field.name in options}
    with running(make(service, settings(**of_settings), keyring=Keyring(keys or {}), **options)) as url:
        yield url


def client_of(url: str, key: str | None = None) -> httpx.Client:
    """A client without certificates, which would take longer to load than most tests."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=WAIT, verify=False)


def connected(url: str) -> socket.socket:
    """A connection to a server, for what no client would send."""
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), WAIT)


def heard(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    json: object = None,
    content: bytes | None = None,
) -> httpx.Response:
    """One request on a connection of its own."""
    with client_of(url) as client:
        return client.request(method, url, headers=headers, json=json, content=content)
