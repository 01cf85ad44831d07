"""Tokens per second and time to first token by the number of clients, of all servers in turn.

In a round each number of clients asks every way the same questions, new ones each round, so that nothing is cached.
Servers that are not asked are stopped meanwhile: vLLM's compute threads wait awake for a second after an answer, and a
server that only looks for messages delays each of the hundreds of times in a step when threads wait for each other.
Paceline's ways are one process; each has a key of its own, so that one does not find what another has cached. A
baseline that cannot run, or fails, is a row that says why.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import httpx
import psutil

from paceline.commands.demo import Children
from paceline.errors import PacelineError

from ..bootstrap import median_of, ratio_of
from ..findings import Findings
from ..report import Claim
from .clients import Answer, Question, ask_together, connect, user
from .model_files import ModelFiles
from .systems import BASELINES, LlamaCpp, Paceline, System, Transformers, Vllm, start

OURS: Final = "paceline autoregressive"
DEFAULT: Final = "paceline"
SAMPLED: Final = "paceline autoregressive, sampled"
TEMPERATURE: Final = 0.8  # of `SAMPLED`; all other ways are greedy
TOP_P: Final = 0.95
WARM_UP_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the measurement."""

    clients: Sequence[int] = (1, 4, 16, 64)
    sampled_clients: Sequence[int] = (1, 16)
    compared_clients: int = 16  # of the claims against baselines
    rounds: int = 5
    prompt: int = 64  # tokens, without the template's
    tokens: int = 32  # of an answer
    baselines: Sequence[System] = BASELINES


@dataclass(frozen=True, slots=True)
class Way:
    """A server and how it is asked."""

    name: str
    system: System
    strategy: str | None = None  # of Paceline; None: its default
    temperature: float = 0.0
    top_p: float = 1.0
    key: str | None = None

    def question(self, model: ModelFiles, number: int, load: Load, tokens: int) -> Question:
        extra = self.system.dialect(model, temperature=self.temperature, top_p=self.top_p, seed=number)
        if self.strategy is not None:
            extra = {**extra, "paceline": {"strategy": self.strategy}}
        return Question((user(model.text(number, load.prompt)),), tokens, extra, self.key)


@dataclass(frozen=True, slots=True)
class Round:
    """All answers of one way to a number of clients at once."""

    answers: Sequence[Answer]

    @property
    def tokens_per_s(self) -> float:
        """All output tokens ÷ seconds from the first request sent to the last token received."""
        seconds = max(answer.last for answer in self.answers) - min(answer.asked for answer in self.answers)
        return sum(answer.tokens for answer in self.answers) / seconds

    @property
    def ttft_ms(self) -> float:
        return statistics.median(answer.ttft_ms for answer in self.answers)


@dataclass(slots=True)
class Measured:
    """Rounds by way and number of clients, and what could not be measured."""

    load: Load
    rounds: dict[tuple[str, int], list[Round]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # way -> reason

    def rates(self, way: str, clients: int) -> list[float]:
        return [each.tokens_per_s for each in self.rounds.get((way, clients), ())]

    def has(self, way: str, clients: int) -> bool:
        return way not in self.left_out and bool(self.rounds.get((way, clients)))

    # ---- results ----------------------------------------------------------------------------------------------------
    def rows(self) -> list[dict[str, object]]:
        ways = dict.fromkeys((OURS, DEFAULT, SAMPLED, *(system.name for system in self.load.baselines)))
        pairs = itertools.product(ways, self.load.clients)
        rows = [self._row(way, clients) for way, clients in pairs if self.has(way, clients)]
        return rows + [{"part": "throughput", "way": way, "left_out": why} for way, why in self.left_out.items()]

    def _row(self, way: str, clients: int) -> dict[str, object]:
        rounds = self.rounds[way, clients]
        rate, ttft = median_of(self.rates(way, clients)), median_of([each.ttft_ms for each in rounds])
        return {
            "part": "throughput",
            "way": way,
            "clients": clients,
            "tokens_per_s": rate.value,
            "low": min(self.rates(way, clients)),
            "high": max(self.rates(way, clients)),
            "ttft_ms": ttft.value,
            "ttft_worst_ms": max(answer.ttft_ms for each in rounds for answer in each.answers),
            "cached_tokens": max(answer.cached_tokens for each in rounds for answer in each.answers),
        }

    def findings(self) -> Findings:
        """Rows, and the claims whose both sides have been measured."""
        found = Findings(self.rows())
        sampled = [
            ratio_of(self.rates(SAMPLED, clients), self.rates(OURS, clients)) for clients in self.load.sampled_clients
        ]
        worse = min(sampled, key=lambda each: each.value)
        found.claim(Claim("serving.sampled_vs_greedy", worse.value, 0.85, "higher"), worse)
        clients = self.load.compared_clients
        for name, kind, target in (
            (f"serving.vs_transformers_serve_{clients}", Transformers, 3.0),
            (f"serving.vs_llama_cpp_{clients}", LlamaCpp, 2.0),
            (f"serving.vs_vllm_{clients}", Vllm, 2.0),
        ):
            names = [each.name for each in self.load.baselines if isinstance(each, kind)]
            rivals = [self.rates(each, clients) for each in names if self.has(each, clients)]
            if rivals:  # against the faster of its modes, round by round
                against = ratio_of(self.rates(OURS, clients), [max(rates) for rates in zip(*rivals, strict=True)])
                found.claim(Claim(name, against.value, target, "higher"), against)
        return found


def measure(children: Children, model: ModelFiles, load: Load) -> Measured:
    """Start all servers, measure all rounds, and leave the servers running until `children` ends."""
    measured = Measured(load)
    paceline = Paceline(keys=("plain", "default", "sampled"))
    ways = [
        Way(OURS, paceline, "autoregressive", key="plain"),
        Way(DEFAULT, paceline, key="default"),
        Way(SAMPLED, paceline, "autoregressive", TEMPERATURE, TOP_P, key="sampled"),
        *(Way(system.name, system) for system in load.baselines),
    ]
    urls: dict[str, str] = {paceline.name: start(children, paceline, model).url}
    for system in load.baselines:
        try:
            if reason := system.lacks():
                measured.left_out[system.name] = reason
            else:
                urls[system.name] = start(children, system, model).url
        except PacelineError as error:
            measured.left_out[system.name] = _reason(error)
    asyncio.run(_rounds(measured, [way for way in ways if way.system.name in urls], urls, model, children))
    return measured


async def _rounds(
    measured: Measured, ways: Sequence[Way], urls: Mapping[str, str], model: ModelFiles, children: Children
) -> None:
    """The first round is a warm-up with short answers, and left out."""
    load, number = measured.load, 0
    clients = {name: connect(url, max(load.clients)) for name, url in urls.items()}
    try:
        for round_index in range(load.rounds + 1):
            for count in load.clients:
                for way in _in_turn(ways, round_index):
                    if way.name in measured.left_out or (way.name == SAMPLED and count not in load.sampled_clients):
                        continue
                    tokens = load.tokens if round_index else WARM_UP_TOKENS
                    questions = [way.question(model, number + i, load, tokens) for i in range(count)]
                    try:
                        with _alone(children, urls[way.system.name]):
                            answers = await ask_together(clients[way.system.name], questions)
                    except (PacelineError, httpx.HTTPError) as error:
                        if isinstance(way.system, Paceline):
                            raise
                        measured.left_out[way.name] = _reason(error)
                        continue
                    if round_index:
                        measured.rounds.setdefault((way.name, count), []).append(Round(answers))
                number += count
    finally:
        for client in clients.values():
            await client.aclose()


@contextmanager
def _alone(children: Children, url: str) -> Iterator[None]:
    """The other servers, and their own children, are stopped within."""
    others = [
        psutil.Process(each.process.pid) for each in children.members if each.url != url and each.process.poll() is None
    ]
    processes = [each for other in others for each in (other, *other.children(recursive=True))]
    try:
        for each in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended
                each.suspend()
        yield
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()


def _in_turn(ways: Sequence[Way], round_index: int) -> Iterable[Way]:
    """Another way begins each round."""
    first = round_index % len(ways)
    return (*ways[first:], *ways[:first])


def _reason(error: Exception) -> str:
    """The first line of an error that has one."""
    return next(iter(str(error).splitlines()), type(error).__name__) or type(error).__name__
