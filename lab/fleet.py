"""A fleet of real servers over a real PostgreSQL, of which some are killed, stopped or replaced while they answer.

`python -m lab.fleet` prints a table; `--only kill` and others run one scenario. The servers have the fake model at a
pace. Each answer that is disturbed is compared with one of the same seed that is not; its reader is a client of HTTP
that goes on at another server whenever its stream is cut.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from bench.bootstrap import ratio_of
from bench.models import kept
from paceline.commands.demo import clean_environment, command
from paceline.settings import PREFIX

if TYPE_CHECKING:
    from tests.postgres import RealPostgres

Json = dict[str, Any]
PACE = "forward=20ms"
TOKENS = 60
START_S = 120.0
SLOW_S = 6.0  # a pause to be told of
GIVE_UP_S = 90.0  # without an event
ENDS = ("response.completed", "response.incomplete", "response.failed")
PASSWORD = "hunter2"  # of a database that asks for none: to be found in no log
_FIRST_LINE = re.compile(r"serving .* on (http://\S+)")
TOOL: Json = {
    "type": "function", "name": "look", "strict": True,
    "parameters": {
        "type": "object", "properties": {"at": {"type": "string", "enum": ["the harbour at noon", "the old tower"]}},
        "required": ["at"], "additionalProperties": False,
    },
}  # fmt: skip
SAMPLED: Json = {"temperature": 1.0}
GREEDY: Json = {"temperature": 0.0}
LATER: Json = {"background": True}
KINDS: tuple[Json, ...] = (
    GREEDY | LATER,
    SAMPLED | LATER,
    SAMPLED,
    GREEDY | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    SAMPLED | LATER | {"conversation": True},
    SAMPLED | {"previous_response_id": True},
    SAMPLED | LATER | {"stream": False},
    SAMPLED | {"tools": [TOOL], "tool_choice": "required"},
)
TEXTUAL = GREEDY.keys() | SAMPLED.keys() | LATER.keys()  # of kinds that stream text, a token at a time


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    async def ready(self) -> None:
        until = time.monotonic() + START_S
        while not self.url:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            if found := _FIRST_LINE.search(self.log.read_text()):
                self.url = found[1]
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Servers:
    """Those that run. `folder`: where each has its state and its log."""

    def __init__(self, folder: Path, database: str, pace: str = PACE, *flags: str) -> None:
        self.folder, self.database, self.pace, self.flags = folder, database, pace, flags
        self.running: list[Server] = []
        self.http = httpx.AsyncClient(  # of all clients
            timeout=httpx.Timeout(GIVE_UP_S, connect=5), limits=httpx.Limits(max_connections=None)
        )
        self.all: list[Server] = []

    def begin(self, *flags: str, **environment: str) -> Server:
        name = f"server{len(self.all)}"
        log = self.folder / f"{name}.log"
        state = str(self.folder / name)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command("serve", "--port", "0", "--state-dir", state, *self.flags, *flags),
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=clean_environment(os.environ) | {
                    f"{PREFIX}DATABASE": self.database, f"{PREFIX}MODEL": "fake", f"{PREFIX}TUNING_EMULATE": self.pace,
                    "OMP_NUM_THREADS": "1",
                } | environment,
            )  # fmt: skip
        self.all.append(Server(process, log))
        return self.all[-1]

    async def add(self, count: int = 1) -> None:
        begun = [self.begin() for _ in range(count)]
        for server in begun:
            await server.ready()
            self.running.append(server)

    def close(self) -> None:
        for server in self.all:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.process.terminate()
        for server in self.all:
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()

    def logged(self) -> str:
        return "".join(server.log.read_text(errors="replace") for server in self.all)


@dataclass(slots=True)
class Reading:
    """Events that a client has seen of an answer."""

    id: str = ""
    events: list[Json] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # monotonic s, of each event
    cuts: list[int] = field(default_factory=list)  # events seen when a stream ended early
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in ENDS

    @property
    def tokens(self) -> int:
        return sum(event["type"].endswith(".delta") for event in self.events)

    def said(self) -> Json:
        """The part that has to be equal in two answers of one seed."""
        deltas: dict[str, str] = {}
        logprobs: list[Any] = []
        for event in self.events:
            if event["type"].endswith(".delta"):
                part = f"{event['type']} {event['output_index']}"
                deltas[part] = deltas.get(part, "") + event["delta"]
                logprobs += event.get("logprobs", ())
        last = self.events[-1]["response"]
        final = [{name: value for name, value in item.items() if name not in ("id", "call_id")}
                 for item in last["output"]]  # fmt: skip
        usage = {name: value for name, value in (last["usage"] or {}).items() if name != "input_tokens_details"}
        return {"deltas": deltas, "logprobs": logprobs, "final": final, "status": last["status"], "usage": usage}


class Client:
    """A reader of many answers, which knows the URLs of all servers."""

    def __init__(self, http: httpx.AsyncClient, urls: Callable[[], Sequence[str]]) -> None:
        self.http = http
        self.urls = urls
        self.turn = itertools.count()
        self.refused: Counter[str] = Counter()

    async def post(self, url: str, path: str, body: Json) -> Json:
        answered = await self.http.post(url + path, json=body)
        answered.raise_for_status()
        found: Json = answered.json()
        return found

    async def body(self, url: str, kind: Json, seed: int, text: str = "Tell me of the harbour.") -> Json:
        body = {"model": "fake", "max_output_tokens": TOKENS, "stream": True, "seed": seed, "input": text} | kind
        if "conversation" in body:
            items = [{"type": "message", "role": "user", "content": "I live at the coast."}]
            body["conversation"] = (await self.post(url, "/v1/conversations", {"items": items}))["id"]
        if "previous_response_id" in body:
            before = body | {"stream": False, "max_output_tokens": 8}
            del before["previous_response_id"]
            body["previous_response_id"] = (await self.post(url, "/v1/responses", before))["id"]
        return body

    async def read(self, url: str, body: Json, reading: Reading) -> Reading:
        """To its end, at whichever server there is."""
        while body["stream"] and not reading.id:  # until it is accepted
            await self._part(reading, self.http.stream("POST", f"{url}/v1/responses", json=body))
        if not body["stream"]:
            reading.id = (await self.post(url, "/v1/responses", body))["id"]
        heard = time.monotonic()
        while not reading.ended:
            known = len(reading.events)
            urls = self.urls()
            url = urls[next(self.turn) % len(urls)]
            query = {"stream": "true"} | ({"starting_after": str(known - 1)} if known else {})
            await self._part(reading, self.http.stream("GET", f"{url}/v1/responses/{reading.id}", params=query))
            heard = time.monotonic() if len(reading.events) > known else heard
            assert time.monotonic() - heard < GIVE_UP_S, f"nothing more of {reading.id} came: {reading.errors}"
            if not reading.ended:
                await asyncio.sleep(0.05)
        return reading

    async def _part(self, reading: Reading, stream: Any) -> None:
        try:
            async with stream as answered:
                if answered.status_code != 200:
                    reading.errors[f"{answered.status_code}"] += 1
                    self.refused[f"{answered.status_code} {answered.headers.get('retry-after')}"] += 1
                    await asyncio.sleep(0.2)
                    return
                async for line in answered.aiter_lines():
                    if line.startswith("data: "):
                        event = json.loads(line[6:])
                        if event["type"] == "error":
                            reading.errors[event["message"]] += 1
                            continue
                        reading.times.append(time.monotonic())
                        reading.events.append(event)
                        reading.id = reading.id or event["response"]["id"]
        except httpx.HTTPError as error:
            reading.errors[type(error).__name__] += 1
        if not reading.ended:
            reading.cuts.append(len(reading.events))

    async def stored(self, url: str, response: str) -> Reading:
        reading = Reading(response)
        await self._part(reading, self.http.stream("GET", f"{url}/v1/responses/{response}", params={"stream": "true"}))
        return reading


@dataclass(slots=True)
class Verdict:
    """Judgement of answers beside undisturbed ones of the same seed."""

    answers: int = 0
    equal: int = 0
    lost: int = 0  # events that were told and are not stored, or are missing in between
    repeated: int = 0
    cut_at: Counter[int] = field(default_factory=Counter)  # tokens seen, of answers that were cut
    pauses: list[float] = field(default_factory=list)  # s
    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def add(self, reading: Reading, beside: Reading, stored: Reading, since: float | None = None) -> None:
        self.answers += 1
        numbers = [event["sequence_number"] for event in reading.events]
        self.repeated += len(numbers) - len(set(numbers))
        self.lost += len(set(range(max(numbers) + 1)) - set(numbers))
        self.lost += sum(event not in stored.events for event in reading.events)
        one, other = reading.said(), beside.said()
        self.equal += one == other
        self.wrong += [
            f"{reading.id} cut at {reading.cuts}: {name}: {one[name]!r:.300} and not {other[name]!r:.300}"
            for name in one if one[name] != other[name]
        ]  # fmt: skip
        for cut in reading.cuts[:1]:
            self.cut_at[sum(event["type"].endswith(".delta") for event in reading.events[:cut])] += 1
        if since is not None and (after := [at for at in reading.times if at > since]):
            self.pauses.append(after[0] - since)
            if self.pauses[-1] > SLOW_S:
                self.slow.append(
                    f"{self.pauses[-1]:.2f} s after {max(reading.cuts, default=0)} events, {reading.errors}"
                )

    def __str__(self) -> str:
        pauses = sorted(self.pauses) or [0.0]
        told = (
            f"{self.answers} answers, {self.equal} equal, {self.lost} events lost, {self.repeated} repeated, "
            f"cut after {min(self.cut_at, default=0)} to {max(self.cut_at, default=0)} tokens, never after "
            f"{sorted(set(range(max(self.cut_at, default=0))) - set(self.cut_at))}, "
            f"pause median {statistics.median(pauses):.2f} s, p95 "
            f"{pauses[int(0.95 * len(pauses))]:.2f} s, most {pauses[-1]:.2f} s"
        )
        return "\n  ".join([told, *self.wrong[:10], *self.slow[:20]])


@asynccontextmanager
async def fleet(postgres: RealPostgres, pace: str = PACE, *flags: str) -> AsyncIterator[Servers]:
    url = postgres.new_database().replace("postgres@", f"postgres:{PASSWORD}@")
    with tempfile.TemporaryDirectory(prefix="paceline-fleet-") as folder:
        servers = Servers(Path(folder), url, pace, *flags)
        try:
            yield servers
        finally:
            await servers.http.aclose()
            servers.close()
            logged = servers.logged()
            assert PASSWORD not in logged
            if "Traceback" in logged:
                sys.stdout.write(logged[max(0, logged.index("Traceback") - 500) :][:5000] + "\n")


@asynccontextmanager
async def answers(
    client: Client, url: str, beside: str, seed: int, kinds: Sequence[Json] = KINDS, stagger: float = 0.08
) -> AsyncIterator[tuple[list[Reading], Callable[[Verdict, float | None], Awaitable[None]]]]:
    """Answers at `url` that have begun one after the other, and undisturbed ones `beside`. Yields what is read, and
    what waits for their ends and judges."""
    bodies = [await client.body(beside, kind, seed + index) for index, kind in enumerate(kinds)]
    others = [await client.body(beside, kind, seed + index) for index, kind in enumerate(kinds)]
    undisturbed = [asyncio.create_task(client.read(beside, body, Reading())) for body in others]
    readings = [Reading() for _ in kinds]
    tasks = []
    for body, reading in zip(bodies, readings, strict=True):
        tasks.append(asyncio.create_task(client.read(url, body, reading)))
        await asyncio.sleep(stagger)

    async def judge(verdict: Verdict, since: float | None) -> None:
        for task, other in zip(tasks, undisturbed, strict=True):
            read, told = await task, await other
            urls = client.urls()
            stored = await client.stored(urls[next(client.turn) % len(urls)], read.id)
            verdict.add(read, told, stored, since)

    yield readings, judge


# ---- scenarios ------------------------------------------------------------------------------------------------------
async def killed(postgres: RealPostgres, rounds: int, first: int = 0) -> Verdict:
    """The server that writes is killed once its first streamed text has a certain number of tokens."""
    verdict = Verdict()
    async with fleet(postgres) as servers:
        client = Client(servers.http, lambda: [server.url for server in servers.running])
        await servers.add(3)
        for number in range(first, first + rounds):
            victim, other = servers.running[0], servers.running[1]
            kinds = [KINDS[(number + index) % len(KINDS)] for index in range(len(KINDS))]
            async with answers(client, victim.url, other.url, 100 * number, kinds) as (readings, judge):
                wanted = number * 7 % TOKENS
                leader = next(read for kind, read in zip(kinds, readings, strict=True) if kind.keys() <= TEXTUAL)
                while leader.tokens < wanted and not leader.ended:
                    await asyncio.sleep(0.002)
                while not all(each.id for each in readings):
                    await asyncio.sleep(0.002)
                servers.running.remove(victim)
                at = time.monotonic()
                victim.kill()
                next_one = servers.begin()
                await judge(verdict, at)
            await next_one.ready()
            servers.running.append(next_one)
    return verdict


async def stopped(postgres: RealPostgres, seconds: float) -> Verdict:
    """A server stands still for longer than its lease, and then goes on with what another has taken over."""
    verdict = Verdict()
    async with fleet(postgres) as servers:
        await servers.add(2)
        asleep, other = servers.running
        client = Client(servers.http, lambda: [other.url])
        async with answers(client, asleep.url, other.url, 0) as (readings, judge):
            while not all(each.id for each in readings):
                await asyncio.sleep(0.002)
            asleep.process.send_signal(signal.SIGSTOP)
            at = time.monotonic()
            followers = [asyncio.create_task(client.stored(other.url, each.id)) for each in readings]
            followed = await asyncio.gather(*followers)  # to their ends, while its own clients wait
            sys.stdout.write(f"  at the other server all have ended after {time.monotonic() - at:.1f} s\n")
            await asyncio.sleep(max(0.0, at + seconds - time.monotonic()))
            asleep.process.send_signal(signal.SIGCONT)
            await judge(verdict, None)
        verdict.wrong += [one.id for one, own in zip(followed, readings, strict=True) if one.events != own.events]
        cuts = sum(bool(each.cuts) for each in readings)
        refused = asleep.log.read_text().count("no longer written here")
        sys.stdout.write(f"  of its own clients {cuts} were cut; {refused} of its transactions were refused\n")
        answered = await client.post(asleep.url, "/v1/responses", await client.body(asleep.url, {"stream": False}, 1))
        assert answered["status"] == "incomplete", "it serves again"
    return verdict


async def restarted(postgres: RealPostgres, count: int, away: float) -> Verdict:
    """The database is killed under load and started again."""
    verdict = Verdict()
    async with fleet(postgres) as servers:
        await servers.add(2)
        client = Client(servers.http, lambda: [server.url for server in servers.running])
        one, other = servers.running
        kinds = [kind | {"max_output_tokens": 150} for kind in (KINDS * count)[:count]]
        async with answers(client, one.url, other.url, 0, kinds, 0.01) as (readings, judge):
            await asyncio.sleep(0.5)
            postgres.kill()
            began = time.monotonic()
            asked = asyncio.create_task(_probe(client, other.url))
            await asyncio.sleep(away)
            postgres.start()
            back = time.monotonic()
            await judge(verdict, back)
            await asked
        gone = [max(after - before for before, after in itertools.pairwise(each.times)) for each in readings]
        sys.stdout.write(
            f"database away for {back - began:.1f} s; longest gap of an answer {max(gone):.1f} s; "
            f"refused meanwhile: {dict(client.refused)}; errors {sum((each.errors for each in readings), Counter())}\n"
        )
    return verdict


async def _probe(client: Client, url: str) -> None:
    """Ask again and again until it answers."""
    while True:
        at = time.monotonic()
        answered = await client.http.post(
            f"{url}/v1/responses", json={"model": "fake", "input": "?", "max_output_tokens": 2}
        )
        sys.stdout.write(
            f"  asked meanwhile: {answered.status_code} after {time.monotonic() - at:.1f} s, Retry-After "
            f"{answered.headers.get('retry-after')} {answered.text[:200] if answered.status_code != 200 else ''}\n"
        )
        if answered.status_code == 200:
            return
        await asyncio.sleep(0.5)


async def rolled(postgres: RealPostgres, rounds: int) -> Verdict:
    """One server after the other is asked to end under load, and replaced."""
    verdict = Verdict()
    async with fleet(postgres) as servers:
        client = Client(servers.http, lambda: [server.url for server in servers.running])
        await servers.add(2)
        for number in range(rounds):
            leaving, other = servers.running[:2]
            next_one = servers.begin()
            await next_one.ready()
            kinds = [kind | {"max_output_tokens": 150} for kind in KINDS]
            async with answers(client, leaving.url, other.url, 1000 + 100 * number, kinds) as (_, judge):
                servers.running = [*servers.running[1:], next_one]
                at = time.monotonic()
                leaving.process.send_signal(signal.SIGTERM)
                unready = asyncio.create_task(_unready(client, leaving.url, at))
                await asyncio.gather(judge(verdict, at), asyncio.to_thread(leaving.process.wait))
                sys.stdout.write(f"  {await unready}, status {leaving.process.returncode}\n")
    return verdict


async def _unready(client: Client, url: str, since: float) -> str:
    """When `/readyz` says no, and when nothing listens any more."""
    first: float | None = None
    while True:
        with suppress(httpx.HTTPError):
            if (await client.http.get(f"{url}/readyz")).status_code == 503:
                first = first or time.monotonic()
            await asyncio.sleep(0.02)
            continue
        ended = time.monotonic() - since
        return f"not ready after {-1 if first is None else first - since:.2f} s, gone after {ended:.2f} s"


async def carried(postgres: RealPostgres, count: int, model: str, rounds: int) -> str:
    """Tokens a second of one server, `count` answers at once, and of two; and what the log costs beside a token."""
    seeds = itertools.count()  # no two alike: what was answered before would be drafted from
    plain = {"paceline": {"strategy": "autoregressive"}, "ignore_eos": True, "max_output_tokens": 64}
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[tuple[float, float]]] = {}
    given = ("--model", model, "--name", "fake", "--debug-options")
    async with fleet(postgres, PACE if model == "fake" else "", *given) as servers:
        await servers.add(2 if model == "fake" else 1)  # two real models have no more cores here than one
        client = Client(servers.http, lambda: [server.url for server in servers.running])
        pids = [server.process.pid for server in servers.running]
        urls = [server.url for server in servers.running]
        ways: list[tuple[str, list[str], Json]] = [
            ("in memory", urls[:1], {"store": False}), ("stored", urls[:1], {}), ("by two servers", urls[:2], {}),
        ][: len(urls) + 1]  # fmt: skip
        for number in range(rounds + 1):
            for name, among, more in ways[:: 1 if number % 2 else -1]:
                bodies = [
                    (url, await client.body(url, SAMPLED | plain | more, next(seeds), f"Tell {index}."))
                    for index in range(count) for url in among
                ]  # fmt: skip
                used, database, at = sum(map(processor_s, pids)), processor_s(postgres.pid), time.monotonic()
                readings = await asyncio.gather(*(client.read(url, body, Reading()) for url, body in bodies))
                took = time.monotonic() - at
                spent = sum(map(processor_s, pids)) - used, processor_s(postgres.pid) - database
                tokens = sum(each.events[-1]["response"]["usage"]["output_tokens"] for each in readings)
                if number:  # the first is a warm-up
                    rates.setdefault(name, []).append(tokens / took)
                    costs.setdefault(name, []).append((1e3 * spent[0] / tokens, 1e3 * spent[1] / tokens))
    told = [
        f"{name}, {count} at once: {statistics.median(each):.1f} tokens/s, "
        f"{statistics.median(cost for cost, _ in costs[name]):.3f} ms of the servers and "
        f"{statistics.median(cost for _, cost in costs[name]):.3f} of PostgreSQL a token"
        for name, each in rates.items()
    ]
    spent_on = {name: [sum(cost) for cost in each] for name, each in costs.items()}
    for what, of in (("processor time", spent_on), ("tokens/s", rates)):
        for (below, first), (above, second) in itertools.pairwise(of.items()):
            ratio = ratio_of(second, first)
            told.append(f"{what}, {above} / {below}: {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    return "\n  ".join(told)


def processor_s(pid: int) -> float:
    """Seconds of processor time of a process and its children."""
    found = psutil.Process(pid)
    total = 0.0
    for each in (found, *found.children()):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total + found.cpu_times().children_user + found.cpu_times().children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("kill", "stop", "database", "roll", "carry"))
    parser.add_argument("--rounds", type=int, default=25, help="servers that are killed, eight answers each")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--away", type=float, default=4.0, help="s that the database is away")
    parser.add_argument("--model", default="fake", help="that `carry` serves: smollm, or as --model of the server")
    parser.add_argument("--answers", type=int, default=16, help="of `carry`, at once at a server")
    asked = parser.parse_args()
    from tests.postgres import real_postgres  # of a checkout

    with real_postgres(durable=True) as postgres:
        scenarios: dict[str, Callable[[], Any]] = {
            "kill": lambda: killed(postgres, asked.rounds, asked.first),
            "stop": lambda: stopped(postgres, 30.0),
            "database": lambda: restarted(postgres, 32, asked.away),
            "roll": lambda: rolled(postgres, 3),
            "carry": lambda: carried(postgres, asked.answers, kept(asked.model), asked.rounds),
        }
        for name, run in scenarios.items():
            if asked.only in (None, name):
                sys.stdout.write(f"{name}: {asyncio.run(run())}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
