"""Gaps between the tokens of short answers while a long prompt is computed beside them, against gaps without it.

Clients ask short questions, one after another, first alone and then from the moment the long prompt is sent until its
first token comes. A gap is the time between two content deltas of one answer. Only Paceline.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from paceline.commands.demo import Children

from ..bootstrap import median_of, ratio_of
from ..findings import Findings
from ..report import Claim
from .clients import Answer, Question, ServingError, ask, connect, user
from .model_files import ModelFiles
from .systems import Paceline, start

NAME: Final = "serving.gap_beside_long_prompt"
STRATEGY: Final = {"paceline": {"strategy": "autoregressive"}}


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the measurement, in tokens where nothing else is said."""

    clients: int = 16
    question: int = 16
    answer: int = 48
    alone: int = 3  # answers of each client without the long prompt
    long_prompt: int = 30_000
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Round:
    alone_ms: Sequence[float]  # gaps
    beside_ms: Sequence[float]
    long_ttft_ms: float


def measure(children: Children, model: ModelFiles, load: Load) -> Findings:
    """Start a server, and leave it running until `children` ends."""
    paceline = Paceline(keys=("short", "long"))
    url = start(children, paceline, model).url
    extra = {**paceline.dialect(model, temperature=0.0, top_p=1.0, seed=0), **STRATEGY}
    return _findings(asyncio.run(_rounds(url, extra, model, load)))


async def _rounds(url: str, extra: Mapping[str, object], model: ModelFiles, load: Load) -> list[Round]:
    numbers = itertools.count()
    async with connect(url, load.clients + 1) as client:

        async def ask_about(tokens: int, limit: int, key: str) -> Answer:
            return await ask(client, Question((user(model.text(next(numbers), tokens)),), limit, extra, key))

        async def write(answers: int) -> list[Answer]:
            return [await ask_about(load.question, load.answer, "short") for _ in range(answers)]

        async def round_of() -> Round:
            alone = await asyncio.gather(*(write(load.alone) for _ in range(load.clients)))
            long, beside = await _beside(
                load.clients,
                lambda: ask_about(load.question, load.answer, "short"),
                lambda: ask_about(load.long_prompt, 1, "long"),
            )
            gaps = _gaps(beside, long.asked, long.first)
            return Round(list(_gaps(itertools.chain(*alone))), list(gaps), long.ttft_ms)

        await asyncio.gather(*(write(1) for _ in range(load.clients)))  # a warm-up, left out
        return [await round_of() for _ in range(load.rounds)]


async def _beside(
    clients: int, ask_short: Callable[[], Awaitable[Answer]], ask_long: Callable[[], Awaitable[Answer]]
) -> tuple[Answer, list[Answer]]:
    """The long prompt's answer, sent when all clients write, and theirs: as long as it has not come."""
    done, begun = asyncio.Event(), asyncio.Barrier(clients + 1)

    async def write() -> list[Answer]:
        answers = [await ask_short()]
        await begun.wait()
        while not done.is_set():
            answers.append(await ask_short())
        return answers

    async def long() -> Answer:
        await begun.wait()
        try:
            return await ask_long()
        finally:
            done.set()

    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(long())
        writing = [tasks.create_task(write()) for _ in range(clients)]
    return asked.result(), [answer for each in writing for answer in each.result()]


def _gaps(answers: Iterable[Answer], begin: float = 0.0, end: float = float("inf")) -> Iterator[float]:
    """In ms: those that some of this time is in."""
    for answer in answers:
        yield from (1e3 * (b - a) for a, b in pairwise(answer.deltas) if begin < b and a < end)


def _findings(rounds: Sequence[Round]) -> Findings:
    alone, beside = [_high(each.alone_ms) for each in rounds], [_high(each.beside_ms) for each in rounds]
    rows = [
        _row("alone", alone, [each.alone_ms for each in rounds]),
        _row("beside a long prompt", beside, [each.beside_ms for each in rounds])
        | {"long_ttft_ms": statistics.median(each.long_ttft_ms for each in rounds)},
    ]
    found = Findings(rows)
    ratio = ratio_of(beside, alone)
    found.claim(Claim(NAME, ratio.value, 2.0, "lower"), ratio)
    return found


def _row(way: str, high: Sequence[float], gaps: Sequence[Sequence[float]]) -> dict[str, object]:
    estimate = median_of(high)
    return {
        "part": "gaps",
        "way": way,
        "gap_p95_ms": estimate.value,
        "low": min(high),
        "high": max(high),
        "gap_median_ms": statistics.median(itertools.chain.from_iterable(gaps)),
        "gap_worst_ms": max(itertools.chain.from_iterable(gaps)),
        "gaps": sum(map(len, gaps)),
    }


def _high(gaps: Sequence[float]) -> float:
    """The 95th percentile. Raises ServingError if there are too few."""
    if len(gaps) < 2:
        raise ServingError("the long prompt was computed before two tokens were written")
    return statistics.quantiles(gaps, n=20)[-1]
