"""Tokens per second of `lookup_tree` beside plain decoding and other ways of drafting, on Spec-Bench's six tasks.

All ways run through the same engine, thread and session, in turns, and must say the same text. Once the end token is
banned, so that every answer has the same length (small models then repeat themselves, which flatters all drafters), and
once answers end where the model wants. Besides: dynamic against static trees of equal size, a 0.5B-shaped model with
replayed acceptance, and twenty settings in which drafts do not pay.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine, MachineConfig

from .drafting import adversarial as adversary
from .drafting import large_shape as replayed
from .drafting.drafters import OURS, PLAIN, Memory, Way, sized, ways
from .drafting.single_session import Answer, together
from .drafting.workloads import Ids, Subject, demo_pair, questions, real_and_tiny
from .report import Claim, Options, Report

NAME = "lookup_tree"
SUMMARY = "tokens/s of drafting without a model; baselines: plain, look-up, automaton, recycling, draft model"
BUDGETS = (8, 16, 32, 64)
ENDINGS = ("banned", "the model's")  # the end token never comes, or when the model wants it
WARM_UP = 1  # answers of each task that do not count
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    tokens: int = 96  # of an answer
    prompts: int = 6  # of a task that count
    identity: int = 200  # sampled answers that are compared with plain decoding, besides all prompts greedily
    replayed: int = 6  # answers
    forward_s: float = 0.01  # of an adversarial engine
    rounds: int = 8


QUICK = Size(tokens=24, prompts=1, identity=6, replayed=1, rounds=1)


def run(options: Options) -> Report:
    size = QUICK if options.quick else Size()
    count = WARM_UP + size.prompts
    asked = questions(options.data, count)
    demo = demo_pair(asked)
    subjects = [demo] if options.quick else [demo, *real_and_tiny(options.data, asked, size.tokens)]
    rows: list[Row] = []
    for subject in subjects:
        found = ways(subject.draft_model)
        for ending in ENDINGS[: 1 if options.quick else 2]:
            rows += asyncio.run(_measure(subject, found, size, ending))
    trees = asyncio.run(_sizes(demo, size, BUDGETS[:1] if options.quick else BUDGETS))
    same, compared = asyncio.run(_identity(demo, questions(options.data, None if not options.quick else 1), size))
    half, half_ratio, beside = replayed.measure(demo, tokens=size.tokens, prompts=size.replayed, quick=options.quick)
    settings = [
        asyncio.run(adversary.measure(setting, forward_s=size.forward_s, rounds=size.rounds))
        for setting in adversary.SETTINGS
    ]
    return Report(
        NAME,
        _conditions(options, size, subjects, compared),
        [*rows, *trees, *half, *settings],
        [*_claims(rows), *_tree_claims(trees), *_others(settings, half_ratio, beside, same)],
    )


def _task(subject: Subject, sampling: SamplingParams, tokens: int) -> MachineConfig:
    banned = replace(sampling, logit_bias=dict.fromkeys(subject.eos_ids, -100.0))
    return MachineConfig("cloud", True, banned, tokens, subject.eos_ids, subject.vocab_size)


async def _answered(worker: EngineWorker, way: Way, task: MachineConfig, memory: Memory, prompt: Ids) -> Answer:
    known = replace(task, table=memory.table, stats=memory.experience)
    machine: Callable[[], Machine] = partial(way, known, memory)
    (answer,) = await together(worker, [machine], [prompt])
    return answer


async def _measure(subject: Subject, found: Mapping[str, Way], size: Size, ending: str) -> list[Row]:
    """Every way answers every prompt, in turns that begin with another way each time."""
    task = _task(subject, SamplingParams(temperature=0.0), size.tokens)
    if ending != ENDINGS[0]:
        task = replace(task, sampling=SamplingParams(temperature=0.0))
    told: dict[tuple[str, str], list[Answer]] = {}
    memories = {way: Memory(subject.vocab_size) for way in found}
    names = list(found)
    worker = EngineWorker(subject.engine)
    await worker.start()
    try:
        for kind, prompts in subject.prompts.items():
            for number, prompt in enumerate(prompts):
                first = number % len(names)
                answers = {
                    way: await _answered(worker, found[way], task, memories[way], prompt)
                    for way in names[first:] + names[:first]
                }
                _same_text(answers)
                for way, answer in answers.items():
                    if number >= WARM_UP or len(prompts) <= WARM_UP:
                        told.setdefault((kind, way), []).append(answer)
    finally:
        await worker.stop()
    table = memories[OURS].table
    return [
        _row(subject, kind, way, answers, told[kind, PLAIN]) | {"end": ending} for (kind, way), answers in told.items()
    ] + [
        {
            "model": subject.name,
            "way": OURS,
            "table_bytes": table.num_bytes,
            "vocabulary": subject.vocab_size,
            "table_rows": len(table),
        }
    ]


def _same_text(answers: Mapping[str, Answer]) -> None:
    for way, answer in answers.items():
        if answer.tokens != answers[PLAIN].tokens:
            raise AssertionError(f"{way} has changed an answer")


def _row(subject: Subject, kind: str, way: str, answers: Sequence[Answer], plain: Sequence[Answer]) -> Row:
    return {
        "model": subject.name,
        "task": kind,
        "way": way,
        "tokens_per_s": _rate(answers),
        "vs_plain": _rate(answers) / _rate(plain),
        "tokens_per_step": _per_step(answers),
        "rows_per_step": sum(a.stats.get("rows", len(a.tokens)) for a in answers) / sum(_forwards(a) for a in answers),
    }


def _rate(answers: Sequence[Answer]) -> float:
    return sum(answer.timed for answer in answers) / max(1e-9, sum(answer.seconds for answer in answers))


def _forwards(answer: Answer) -> float:
    return answer.stats.get("forwards", len(answer.tokens))


def _per_step(answers: Sequence[Answer]) -> float:
    return sum(a.timed for a in answers) / max(1.0, sum(_forwards(a) - 1 for a in answers))


async def _sizes(subject: Subject, size: Size, budgets: Sequence[int]) -> list[Row]:
    """Tokens per step of trees of equal size: time does not matter here."""
    task = _task(subject, SamplingParams(temperature=0.0), size.tokens)
    rows: list[Row] = []
    worker = EngineWorker(subject.engine)
    await worker.start()
    try:
        for budget in budgets:
            row: Row = {"model": subject.name, "budget": budget}
            for name, way in sized(budget).items():
                memory = Memory(subject.vocab_size)
                answers = [
                    await _answered(worker, way, task, memory, prompt)
                    for prompts in subject.prompts.values()
                    for prompt in prompts[: WARM_UP + min(2, size.prompts)]
                ]
                row[name] = _per_step(answers)
            rows.append(row)
    finally:
        await worker.stop()
    return rows


async def _identity(subject: Subject, asked: dict[str, list[str]], size: Size) -> tuple[float, int]:
    """Share of answers that equal plain decoding's, and how many were compared: all prompts greedily, some sampled."""
    whole = demo_pair(asked)
    prompts = whole.every()
    cases = [(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    cases += [(prompts[i % len(prompts)], SamplingParams(temperature=1.0, seed=i)) for i in range(size.identity)]
    found, memory, equal = ways(None), Memory(subject.vocab_size), 0
    worker = EngineWorker(whole.engine)
    await worker.start()
    try:
        for prompt, sampling in cases:
            task = _task(whole, sampling, min(size.tokens, 32))
            both = [await _answered(worker, found[way], task, memory, prompt) for way in (PLAIN, OURS)]
            equal += both[0].tokens == both[1].tokens
    finally:
        await worker.stop()
    return equal / len(cases), len(cases)


def _by_task(rows: Sequence[Row], ending: str) -> dict[object, dict[object, float]]:
    """Tokens per second beside plain by task and way, the mean over models."""
    found: dict[object, dict[object, list[float]]] = {}
    for row in rows:
        if row.get("end") == ending and "task" in row:
            found.setdefault(row["task"], {}).setdefault(row["way"], []).append(float(str(row["vs_plain"])))
    return {task: {way: statistics.fmean(all_) for way, all_ in of.items()} for task, of in found.items()}


def _claims(rows: Sequence[Row]) -> list[Claim]:
    by_task, natural = (_by_task(rows, ending) for ending in ENDINGS)
    ablations = ("without tables", "without dynamic tree", "without overlap")
    ranks = [
        1 + sum(other > of[OURS] for way, other in of.items() if way not in (*ablations, OURS))
        for of in by_task.values()
    ]
    bytes_ = max(
        float(str(row["table_bytes"])) / float(str(row["vocabulary"])) / NUM_SUCCESSORS
        for row in rows
        if "table_bytes" in row
    )
    mean = statistics.fmean(of[OURS] for of in by_task.values())
    return [
        Claim("lookup_tree.vs_plain", mean, 2.2, "higher", "2.22x Llama-3B, 2.05x 1B, 1.78x Vicuna-7B (DIAA)"),
        *(
            Claim(
                "lookup_tree.vs_plain_natural_end", statistics.fmean(of[OURS] for of in natural.values()), 1.5, "higher"
            )
            for _ in ENDINGS[:1]
            if natural
        ),
        Claim("lookup_tree.worst_rank", float(max(ranks)), 2.0, "lower"),
        Claim("lookup_tree.table_bytes_per_entry", bytes_, 12.0, "lower", "12 (DIAA, table 4)"),
        *(
            Claim(
                f"lookup_tree.{name.replace(' ', '_')}",
                statistics.fmean(of[name] for of in by_task.values()) / mean,
                1.0,
                "lower",
            )
            for name in ablations
        ),
    ]


def _tree_claims(trees: Sequence[Row]) -> list[Claim]:
    worst = min(float(str(row["dynamic"])) / float(str(row["static"])) for row in trees)
    return [Claim("lookup_tree.dynamic_vs_static", worst, 1.0, "higher", "w/o dynamic tree -15 % (DIAA)")]


def _others(settings: Sequence[Row], half_ratio: float, beside: float, same: float) -> list[Claim]:
    worst = min(float(str(row["vs_plain"])) for row in settings)
    return [
        Claim("lookup_tree.half_b_vs_plain", half_ratio, 2.0, "higher"),
        Claim("lookup_tree.half_b_overhead", beside, 0.05, "lower"),
        Claim("lookup_tree.worst_vs_plain", worst, 0.97, "higher"),
        Claim("lookup_tree.identical", same, 1.0, "higher"),
    ]


def _conditions(options: Options, size: Size, subjects: Sequence[Subject], compared: int) -> dict[str, object]:
    return {
        "clock": "real; adversarial engines sleep for their forward",
        "models": [subject.name for subject in subjects],
        "prompts": "Spec-Bench, first turns" if options.data else "made up, of Spec-Bench's kinds",
        "answers": f"{size.tokens} tokens, greedy; {size.prompts} a task after {WARM_UP} warm-up",
        "timed": "from the first token to the last",
        "memory": "tables and guard stay from answer to answer, each way its own, empty at first",
        "compared": f"{compared} answers with plain decoding",
        "replayed": "24 layers, hidden 896, vocabulary 151936, bf16, random; laws of the demo cloud model",
        "adversarial_forward_s": size.forward_s,
        "quick": options.quick,
    }


def plot(report: Report, file: Path) -> None:
    """Tokens per second beside plain decoding, by task and way. Raises ConfigError where matplotlib is missing."""
    from .report import plot_bars

    bars = [row for row in report.rows if "task" in row and row["model"] == "demo cloud" and row["end"] == ENDINGS[0]]
    plot_bars(report, bars, file, x="task", group="way", y="vs_plain", unit="times plain decoding")
