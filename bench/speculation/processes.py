"""Part `processes` of the bench `pipeline`: the served node on real stage processes, ways of drafting in turn.

A round is one question answered by every way, one after another; ratios are within rounds. Every way must write the
text of plain decoding.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from lab.baselines import flowspec
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.tokenizer import Tokenizer
from paceline.models import CLOUD, DEVICE
from paceline.strategies.base import Strategy
from paceline.strategies.registry import STRATEGIES

from ..enlarged_demo import QWEN_05B, enlarge
from ..random_model import Shape
from ..report import Claim
from .staged_node import Pace, StagedNode, staged_node

PLAIN: Final = "autoregressive"
FULL: Final = "full, draft model"
TABLES: Final = "full, tables"
WAYS: Final[Mapping[str, Strategy]] = {
    PLAIN: STRATEGIES[PLAIN],
    **{way: flowspec.strategy_of(way) for way in ("naive", "pruned", "PipeDec")},
    TABLES: replace(STRATEGIES["pipeline"], name="pipeline, tables", uses_draft_model=False),
    FULL: STRATEGIES["pipeline"],
}
SMALL: Final = Shape(layers=6, hidden=448, inner=1024, heads=14)  # of a draft model beside the 0.5B shape
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class ProcessLoad:
    pace: Pace = Pace()  # noqa: RUF009  # frozen
    questions: int = 2
    tokens: int = 24
    temperatures: Sequence[float] = (0.0, 1.0)
    at_once: int = 8  # answers, of a further table
    hops: Sequence[float] = (0.0025, 0.025)  # s one way, of a further table: RTT of 5 and 50 ms
    max_prompt: int = 96  # tokens; of a longer one the beginning is used
    large: Pace | None = Pace(forward_s=1.5, row_s=0.0045, draft_s=0.15)  # noqa: RUF009  # frozen. Of the 0.5B shape
    large_questions: int = 2
    large_tokens: int = 16


QUICK_PROCESSES: Final = ProcessLoad(
    pace=Pace(stages=2, forward_s=0.02), questions=1, tokens=8, temperatures=(0.0,), at_once=2, hops=(), large=None
)


def measure(load: ProcessLoad, texts: Mapping[str, Sequence[str]]) -> tuple[list[Row], list[Claim]]:
    """texts: questions by task; one of each task is taken in turn."""
    tokenizer = Tokenizer.load(CLOUD)
    asked = [text for group in zip(*texts.values(), strict=False) for text in group]
    prompts = [tuple(tokenizer.chat([{"role": "user", "content": text}]))[: load.max_prompt] for text in asked]
    bias = dict.fromkeys(tokenizer.eos_ids, -100.0)
    return asyncio.run(_measure(load, prompts, bias))


async def _measure(
    load: ProcessLoad, prompts: Sequence[tuple[int, ...]], bias: dict[int, float]
) -> tuple[list[Row], list[Claim]]:
    def sampling(temperature: float, seed: int) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=seed, logit_bias=bias)

    rows: list[Row] = []
    async with staged_node(load.pace) as staged:
        for way in WAYS.values():  # what is learnt and compiled at first is not measured
            await staged.answer(prompts[0], sampling(0.0, 0), 4, way)
        for temperature in load.temperatures:
            for number in range(load.questions):
                prompt, params = prompts[number % len(prompts)], sampling(temperature, number)
                rows += await _round(staged, prompt, params, load, WAYS)
        for temperature in load.temperatures if load.at_once else ():
            rows += await _together(staged, prompts, [sampling(temperature, n) for n in range(load.at_once)], load)
        rows.append({"resident_mib_of_stages": staged.resident_mib(), "of_head": _own_mib()})
    for hop in load.hops:
        async with staged_node(replace(load.pace, hop_s=hop)) as staged:
            chosen = {way: WAYS[way] for way in (PLAIN, "naive", FULL)}
            await staged.answer(prompts[0], sampling(0.0, 0), 4, WAYS[FULL])
            found = await _round(staged, prompts[0], sampling(0.0, 0), load, chosen)
            rows += [{"rtt_ms": 2000 * hop} | row for row in found]
    return rows + await _large(load, prompts, sampling), _claims(rows)


async def _large(
    load: ProcessLoad, prompts: Sequence[tuple[int, ...]], sampling: Callable[[float, int], SamplingParams]
) -> list[Row]:
    """Rounds of the demo pair enlarged to 151,936 ids, the target to the shape of a 0.5B model."""
    if load.large is None:
        return []
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        target = enlarge(CLOUD, QWEN_05B, Path(folder, "target"))
        draft = enlarge(DEVICE, SMALL, Path(folder, "draft"))
        async with staged_node(load.large, target, draft) as staged:
            await staged.answer(prompts[0], sampling(0.0, 0), 4, WAYS[FULL])
            fewer = replace(load, tokens=load.large_tokens)
            for temperature in load.temperatures:
                for number in range(load.large_questions):
                    prompt = prompts[number % len(prompts)]
                    found = await _round(staged, prompt, sampling(temperature, number), fewer, WAYS)
                    rows += [{"shape": "0.5B, 152k ids"} | row for row in found]
            rows.append({"shape": "0.5B, 152k ids", "resident_mib_of_stages": staged.resident_mib()})
    return rows


async def _round(
    staged: StagedNode,
    prompt: tuple[int, ...],
    params: SamplingParams,
    load: ProcessLoad,
    ways: Mapping[str, Strategy],
) -> list[Row]:
    answers = {way: await staged.answer(prompt, params, load.tokens, how) for way, how in ways.items()}
    if len({answer.text for answer in answers.values()}) != 1:
        raise AssertionError("a way has changed the text")
    plain = answers[PLAIN].tokens_per_s
    return [
        {
            "part": "processes",
            "question": params.seed,
            "temperature": params.temperature,
            "way": way,
            "tokens_per_s": answer.tokens_per_s,
            "vs_autoregressive": answer.tokens_per_s / plain,
            "vs_naive": answer.tokens_per_s / answers["naive"].tokens_per_s,
            "draft_forwards_per_token": answer.stats.get("draft_forwards", 0.0) / answer.tokens,
            "tokens_per_segment": answer.tokens / answer.stats["segments"] if "segments" in answer.stats else 1.0,
            "load": os.getloadavg()[0],
        }
        for way, answer in answers.items()
    ]


async def _together(
    staged: StagedNode, prompts: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams], load: ProcessLoad
) -> list[Row]:
    """Answers at once: all tokens after the first pieces, from the first piece of any to the last of all."""
    found: list[dict[str, float | int | str]] = []
    texts: set[tuple[str, ...]] = set()
    for way in (PLAIN, TABLES, FULL):
        answers = await asyncio.gather(
            *(
                staged.answer(prompts[number % len(prompts)], params, load.tokens, WAYS[way])
                for number, params in enumerate(sampling)
            )
        )
        texts.add(tuple(answer.text for answer in answers))
        seconds = max(answer.last for answer in answers) - min(answer.first for answer in answers)
        tokens = sum(answer.tokens - answer.tokens_first for answer in answers)
        found.append(
            {"at_once": len(answers), "temperature": sampling[0].temperature, "way": way}
            | {"tokens_per_s": tokens / seconds, "load": os.getloadavg()[0]}
        )
    if len(texts) != 1:
        raise AssertionError("a way has changed the text")
    plain = float(found[0]["tokens_per_s"])
    return [{**row, "vs_autoregressive": float(row["tokens_per_s"]) / plain} for row in found]


def _own_mib() -> int:
    return int(psutil.Process().memory_info().rss) >> 20


def _claims(rows: Sequence[Row]) -> list[Claim]:
    """Medians over rounds, without those of other hops."""

    def median(way: str, against: str, temperature: float | None = None) -> float:
        return statistics.median(
            float(str(row[against]))
            for row in rows
            if row.get("part") and "rtt_ms" not in row and row["way"] == way
            if temperature in (None, row["temperature"])
        )

    temperatures = sorted({float(str(row["temperature"])) for row in rows if row.get("part")})
    claims = [
        Claim("pipeline.processes_vs_autoregressive", median(FULL, "vs_autoregressive"), 1.8, "higher"),
        Claim("pipeline.processes_vs_naive", median(FULL, "vs_naive"), 1.8, "higher", "1.35x to 1.77x (FlowSpec)"),
        Claim("pipeline.processes_tables_vs_naive", median(TABLES, "vs_naive"), 1.0, "higher"),
    ]
    claims += [
        Claim(f"pipeline.processes_vs_naive_at_{temperature:g}", median(FULL, "vs_naive", temperature), 1.8, "higher")
        for temperature in temperatures
    ]
    return claims
