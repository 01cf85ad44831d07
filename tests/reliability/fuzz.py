"""Hours of mutated input: documents through the parsing process, frames and HTTP at a real server with the fake
model, with an honest stream beside them.

Prints what was tried every 30 s, with the server's memory and the p95 gap of the honest stream. The exit code is 1 if
the server ended, answered 5xx, logged a traceback or harmed the honest stream, or if the parsing process let anything
but a refusal through.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from paceline.engine.fake import fake_model
from paceline.errors import DocumentError, LinkClosed
from paceline.rag.parsing.process import ParserProcess
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import OpenSession
from tests.rag.parsing import made
from tests.reliability.mutated_drafts import Aim
from tests.reliability.mutated_requests import RequestMutator
from tests.reliability.mutation import Mutator
from tests.reliability.raw_link import device_link, enrolled
from tests.reliability.raw_websocket import CLOSE, RawLink, broken_frames, frame, until_closed
from tests.reliability.real_server import WAIT, Honest, RealServer, hurried, many_files, quantile, real_server

REPORT_S = 30.0
MISTAKE = re.compile(r"[\d-]+ [\d:,]+ (ERROR|CRITICAL) ")  # a line of the log; what a stranger says is further on
MAX_FINDINGS = 20  # then it ends
SEQUENCES = 20  # of a device's link, before it is closed
FAULTY = 0.1  # share of them that end with a frame that cannot be decoded, which closes the link
VOCAB = fake_model().tokenizer.vocab_size
TEXTS = {
    "a.md": b"# Harbour\n\nBoats *moor* on the [north](x) side.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n" * 5,
    "a.txt": "Ünïcödé and plain text.\n".encode() * 20,
    "a.html": b"<html><head><title>t</title></head><body><h1>a</h1><p>b<table><tr><td>c</table></body></html>" * 3,
    "a.csv": b'name,berth\n"Ann, B",7\nBert,"8\n9"\n' * 9,
    "a.json": b'{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "a.py": b"def f(x):\n    return x + 1\n" * 9,
}
CHAPTERS = {name: b"<html><body><h1>a</h1><p>Boats moor.</p></body></html>" for name in ("one", "two")}


class Fuzzing:
    """One run. Workers are threads that go on until `stop`; what they find is in `findings`."""

    def __init__(self, server: RealServer, honest: Honest, seed: int) -> None:
        self.server = server
        self.honest = honest
        self.findings: list[str] = []
        self.tried: Counter[str] = Counter()
        self.stop = threading.Event()
        self._seed = seed
        self._log_read = 0

    def workers(self) -> list[threading.Thread]:
        work = {"documents": self.documents, "frames": self.frames, "sequences": self.sequences, "HTTP": self.requests}
        return [threading.Thread(target=self._run, args=each, daemon=True, name=each[0]) for each in work.items()]

    def _run(self, name: str, work: Callable[[random.Random], None]) -> None:
        try:
            work(random.Random(f"{self._seed} {name}"))
        except Exception:
            self.found(f"the fuzzing of {name} ended: {traceback.format_exc()}")

    def found(self, what: str) -> None:
        self.findings.append(what)
        say(f"FOUND {what[:3000]}")
        if len(self.findings) >= MAX_FINDINGS:
            self.stop.set()

    # ---- what is tried ----------------------------------------------------------------------------------------------
    def documents(self, rng: random.Random) -> None:
        """Documents of every kind, damaged, through the process that reads uploads."""
        pdf = made.pdf([made.shown("Boats moor here.")] * 2, "Harbour", compressed=True)
        samples = {**TEXTS, "a.pdf": pdf, "a.docx": made.word_document(), "a.epub": made.book(CHAPTERS, ["one", "two"])}
        names = sorted(samples)
        with ParserProcess() as parser:
            while not self.stop.is_set():
                name = rng.choice(names)
                data = damaged(rng, samples[name])
                try:
                    parser.parse_bytes(rng.choice((name, rng.choice(names))), data)
                    self.tried["documents read"] += 1
                except DocumentError as refusal:
                    self.tried["documents refused"] += 1
                    if "(signal" in str(refusal):
                        self.tried["documents that ended their reader"] += 1
                except Exception:
                    self.found(f"a document {name} of {data[:200]!r}..: {traceback.format_exc()}")

    def frames(self, rng: random.Random) -> None:
        """Frames of strangers, by tens of connections."""
        mutator = Mutator(rng, vocab_size=VOCAB)
        while not self.stop.is_set():
            links = [RawLink(self.server.address) for _ in range(10)]
            try:
                for link in links:
                    link.send(broken_frames(rng, mutator.garbage()))
                    link.send(frame(CLOSE, b"\x03\xe8"))
                until_closed(links)
            finally:
                for link in links:
                    link.socket.close()
            self.tried["strangers' frames"] += len(links)

    def sequences(self, rng: random.Random) -> None:
        """Messages of a device that is admitted."""
        asyncio.run(self._sequences(rng))

    async def _sequences(self, rng: random.Random) -> None:
        mutator = Mutator(rng, vocab_size=VOCAB)
        credential = await enrolled(self.server.url, self.server.directory / "state", "mutant")
        while not self.stop.is_set():
            try:
                link = await device_link(self.server.url, credential)
            except LinkClosed as error:
                self.found(f"an honest handshake was refused: {error}")
                await asyncio.sleep(1.0)
                continue
            running = asyncio.create_task(link.run())
            for session in range(1, 2 * SEQUENCES, 2):
                aim = Aim(session)
                faulty = rng.random() < FAULTY
                await link.send(mutator.legal(OpenSession, aim), *mutator.sequence(aim, faulty=faulty))
                self.tried["sequences of a device"] += 1
                await asyncio.sleep(0)
                if link.closed.is_set():
                    self.tried["links closed for a message"] += 1
                    break
            else:
                await link.close(CloseCode.CLOSING)
            await running

    def requests(self, rng: random.Random) -> None:
        """HTTP with a key."""
        mutator = RequestMutator(rng)
        with self.server.client("bert") as http:
            while not self.stop.is_set():
                request = mutator.request()
                content = request.content or None
                try:
                    answer = http.request(request.method, request.path, content=content, headers=request.headers)
                except (httpx.InvalidURL, httpx.LocalProtocolError):
                    continue
                self.tried["requests"] += 1
                self.tried[f"answered {answer.status_code // 100}xx"] += 1
                if answer.status_code >= 500:
                    self.found(f"{answer.status_code} for {request}: {answer.text}")

    # ---- what is seen -----------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Find what went wrong since the last look."""
        if not self.server.process.is_running() or self.server.process.status() == psutil.STATUS_ZOMBIE:
            self.found(f"the server ended: {self.server.log()[-3000:]}")
            self.stop.set()
        log = self.server.log()
        fresh, self._log_read = log[self._log_read :], len(log)
        lines = fresh.splitlines()
        wrong = [at for at, line in enumerate(lines) if "Traceback" in line or MISTAKE.match(line)]
        if wrong:
            self.found("in the log:\n" + "\n".join(lines[max(0, wrong[0] - 2) : wrong[0] + 25]))
        while self.honest.mistakes:
            self.found(f"the honest stream: {self.honest.mistakes.pop()}")
            self.stop.set()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, repeated and put in; sometimes none."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 3, 10, 60))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 | 1 if place < len(changed):
                changed[place] = rng.randrange(256)
            case 2:
                del changed[place : place + rng.randrange(60)]
            case 3:
                changed[place:place] = changed[place : place + rng.randrange(300)] * rng.choice((1, 2, 50))
            case _:
                changed[place:place] = (
                    rng.choice((b"<", b"[", b"(", b"\0", b"\xff", b'"', b"&a;", b"#", b"|", b"`")) * 30
                )
    return bytes(changed[:1_000_000])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as directory,
        many_files(),
        real_server(Path(directory), *hurried(Path(directory))) as server,
        Honest(server.url) as honest,
    ):
        fuzzing = Fuzzing(server, honest, given.seed)
        memory = server.rss()
        workers = fuzzing.workers()
        for each in workers:
            each.start()
        seen = 0
        deadline = began + given.minutes * 60
        while not fuzzing.stop.wait(max(0.0, min(REPORT_S, deadline - time.monotonic()))):
            fuzzing.look()
            gaps, seen = honest.gaps[seen:], len(honest.gaps)
            tried = ", ".join(f"{number} {what}" for what, number in sorted(fuzzing.tried.items()))
            say(
                f"{time.monotonic() - began:6.0f} s  RSS {server.rss() / 2**20:.0f} MiB (from {memory / 2**20:.0f})  "
                f"honest p95 gap {quantile(gaps, 0.95) * 1000:.0f} ms of {len(gaps)}  {tried}"
            )
            if time.monotonic() >= deadline:
                break
        fuzzing.stop.set()
        for each in workers:
            each.join(WAIT)
            if each.is_alive():
                fuzzing.found(f"the fuzzing of {each.name} does not end")
        fuzzing.look()
        p95 = honest.p95 * 1000
        say(
            f"seed {given.seed}: {sum(fuzzing.tried.values())} tried, {len(fuzzing.findings)} found; RSS "
            f"{memory / 2**20:.0f} -> {server.rss() / 2**20:.0f} MiB; honest stream: {len(honest.firsts)} answers, p95 "
            f"gap {p95:.0f} ms"
        )
    return 1 if fuzzing.findings else 0


if __name__ == "__main__":
    sys.exit(main())
