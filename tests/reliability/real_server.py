"""A real server in a process of its own, what it costs, strangers at its doors, and an honest stream beside them."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from paceline.commands.demo import configured
from paceline.wire.messages import SUBPROTOCOL
from server.devices import Registry
from tests.forked import USUAL, starting
from tests.postgres import registry_of
from tests.reliability.streams import Stream
from tests.server.test_programs import ROOT, STARTER

WAIT = 120.0  # s, far beyond every limit of the server
KEYS = ("ann", "bert")
BODY = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
NO_END = {"logit_bias": {"256": -100}}  # no answer ends by itself
UPGRADE = (
    "GET /v1/link HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    f"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: {SUBPROTOCOL}\r\n\r\n"
).encode()

# The server, with room for 27 answers instead of 1,152 and for 18 background responses; both keep a ninth.
SMALL = f"""
from paceline.api.responses import runs
from paceline.runtime import admission

admission.MAX_ANSWERS, runs.MAX_BACKGROUND = 27, 18
{STARTER}
"""


@dataclass(frozen=True, slots=True)
class RealServer:
    url: str
    directory: Path
    process: psutil.Process

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def rss(self) -> int:
        """Bytes in memory, of this process alone."""
        return int(self.process.memory_info().rss)

    def log(self) -> str:
        return (self.directory / "log").read_text("utf-8", "replace")

    def registry(self) -> Registry:
        return registry_of(self.directory / "state")

    def client(self, key: str = KEYS[0]) -> httpx.Client:
        return client(self.url, key)

    def check(self) -> None:
        """It runs, has made no mistake, and answers."""
        assert self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        before, _, after = self.log().partition("Traceback")
        assert not after, f"{before[-400:]}Traceback{after[:4000]}"
        with self.client() as http:
            assert http.post("/v1/chat/completions", json=BODY).status_code == 200


def hurried(directory: Path) -> tuple[str, str]:
    """Flags of a server that takes 5 ms a token and writes short answers where a request sets no limit."""
    return configured(directory, "answers.max_tokens_default = 64", "tuning.emulate = 'forward=5ms'")


@contextmanager
def real_server(
    directory: Path, *flags: str, files: int | None = None, program: str = STARTER, keys: Sequence[str] = KEYS
) -> Iterator[RealServer]:
    """A server with the fake model and these keys. files: limit of open ones."""

    def limit() -> None:
        assert files is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    settings = ["--model", "fake", "--port", "0", "--state-dir", str(directory / "state")]
    settings += ["--api-keys", ",".join(keys)] if keys else []
    # One that changes modules before others import them cannot be forked from a process that has imported all.
    how = nullcontext() if program == STARTER else starting(USUAL)
    with (directory / "log").open("wb") as log, how:
        process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *settings, *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=None if files is None else limit,
        )
    try:
        assert process.stdout is not None
        ready = next((line for line in process.stdout if "serving" in line), "")
        assert ready, (directory / "log").read_text()
        yield RealServer(ready.split(" on ")[1].split(" ")[0], directory, psutil.Process(process.pid))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=WAIT)
        except BaseException:
            process.kill()
            raise


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=WAIT, trust_env=False, headers={"Authorization": f"Bearer {key}"})


# ---- strangers ------------------------------------------------------------------------------------------------------
def strangers(url: str, stack: ExitStack, number: int, says: bytes) -> list[socket.socket]:
    """Connections that say this and nothing more."""
    address = httpx.URL(url)
    found = []
    for _ in range(number):
        each = stack.enter_context(socket.create_connection((address.host, address.port or 80), WAIT))
        each.setblocking(False)
        found.append(each)
        try:
            each.send(says or b"")
        except ConnectionError:
            continue  # it has been closed already
    return found


def ends(waiting: list[socket.socket]) -> Iterator[socket.socket]:
    """Connections as the server closes them, in this order; none is ever answered or closed from this side."""
    poll = select.poll()
    open_ones = {each.fileno(): each for each in waiting}
    for number in open_ones:
        poll.register(number, select.POLLIN)
    while open_ones:
        found = poll.poll(WAIT * 1000)
        assert found, f"{len(open_ones)} connections are open still"
        for number, _ in found:
            try:
                ended = open_ones[number].recv(65_536) == b""
            except ConnectionError:
                ended = True
            except BlockingIOError:
                continue
            if ended:
                poll.unregister(number)
                yield open_ones.pop(number)


@contextmanager
def many_files(number: int = 4096) -> Iterator[None]:
    """Allow so many open files in this process, where the machine does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(number, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- an honest stream -----------------------------------------------------------------------------------------------
@dataclass
class Honest:
    """A client on a thread of its own that streams one answer again and again. `mistakes` is what went wrong, another
    text than the first included."""

    url: str
    key: str = KEYS[0]
    tokens: int = 64  # of each answer
    more: Mapping[str, object] = field(default_factory=dict)  # fields of its requests
    text: str = ""  # that each answer has; empty: that of the first
    gaps: list[float] = field(default_factory=list)  # s between two pieces of an answer
    firsts: list[float] = field(default_factory=list)  # s from a request to its first piece
    mistakes: list[str] = field(default_factory=list)

    @property
    def p95(self) -> float:
        return quantile(self.gaps, 0.95)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._began.wait(WAIT), self.mistakes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(WAIT)
        assert kind is not None or not self._thread.is_alive(), "its stream hangs"

    def _run(self) -> None:
        body = {**BODY, **NO_END, "max_tokens": self.tokens, "seed": 5, **self.more}
        while not (self._stop.is_set() or self.mistakes):
            answer = Stream(self.url, body, self.key)
            try:
                answer.wait_for(1)
                self._began.set()
                self._took(answer.join())
            except AssertionError as error:
                self.mistakes.append(repr(error))
            finally:
                self._began.set()

    def _took(self, answer: Stream) -> None:
        self.text = self.text or answer.text
        assert answer.whole and answer.text == self.text, (
            f"{answer.status} {answer.error}: a stream was cut, or has another text: {answer.text!r} for {self.text!r}"
        )
        times = [time for time, _ in answer.pieces]
        self.firsts.append(times[0] - answer.began)
        self.gaps += [after - before for before, after in pairwise(times)]


def calm_p95(server: RealServer, answers: int = 3) -> float:
    """p95 gap in s of so many answers with nothing beside them."""
    with Honest(server.url) as honest:
        while len(honest.firsts) <= answers and not honest.mistakes:
            time.sleep(0.02)
    assert not honest.mistakes
    return honest.p95


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which this part of all lies; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else 0.0
