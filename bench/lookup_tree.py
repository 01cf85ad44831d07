"""Tokens per second of `lookup_tree`, plain decoding and other drafting methods, on Spec-Bench's six tasks.

All methods run on the same engine, thread and session, alternating, and must write the same text. Two runs: with the
end token banned, so that every answer has the same length (small models then repeat themselves, which favours all
drafters), and with natural ends. Also: dynamic against static trees of equal size, a 0.5B-shaped model with replayed
acceptance of every model, and twenty settings in which drafts do not pay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lab.configs import a_config, changed
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.sampler import SamplingParams
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine, MachineConfig

from .bootstrap import Estimate, share_of, worst_of
from .drafting import adversarial, agent_loop, large_shape
from .drafting.drafters import OURS, PLAIN, DraftMemory, Way, sized, ways
from .drafting.large_shape import Replayed
from .drafting.single_session import Answer, together
from .drafting.speeds import Group, forwards, per_step, rate, relative, steps_relative, worst_rank
from .drafting.workloads import Ids, ModelPrompts, demo_pair, questions, tiny_model_prompts
from .findings import claimed
from .plots import bars
from .report import Claim, Options, Report

NAME = "lookup_tree"
SUMMARY = "tokens/s of drafting without a model; baselines: plain, look-up, automaton, recycling, draft model"
BUDGETS = (8, 16, 32, 64)
ENDINGS = ("banned", "the model's")  # the end token never occurs, or where the model generates it
WARM_UP = 1  # answers of each task that are not counted
ABLATIONS = ("without tables", "without dynamic tree", "without overlap")
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of measurement."""

    tokens: int = 96  # of an answer
    prompts: int = 6  # of a task, after the warm-up
    identity: int = 200  # sampled answers compared with plain decoding, in addition to all prompts greedily
    replayed: int = 6  # answers
    forward_s: float = 0.01  # of an adversarial engine
    rounds: int = 8


QUICK = Size(tokens=24, prompts=1, identity=6, replayed=1, rounds=1)


def run(options: Options) -> Report:
    size = QUICK if options.quick else Size()
    count = WARM_UP + size.prompts
    prompts = questions(options.data, count)
    demo = demo_pair(prompts)
    models = [demo] if options.quick else [demo, *tiny_model_prompts(options.data, prompts, size.tokens)]
    rows: list[Row] = []
    tasks: dict[str, dict[str, list[Group]]] = {}
    for model in models:
        by_name = ways(model.draft_model)
        for ending in ENDINGS[: 1 if options.quick else 2]:
            more, groups = asyncio.run(_measure(model, by_name, size, ending))
            rows += more
            for task, group in groups.items():
                tasks.setdefault(ending, {}).setdefault(task, []).append(group)
    trees, ratios = asyncio.run(_sizes(demo, size, BUDGETS[:1] if options.quick else BUDGETS))
    identical = asyncio.run(_identity(demo, questions(options.data, None if not options.quick else 1), size))
    half = large_shape.measure(models, tokens=size.tokens, prompts=size.replayed)
    settings = [
        asyncio.run(adversarial.measure(setting, forward_s=size.forward_s, rounds=size.rounds))
        for setting in adversarial.SETTINGS
    ]
    return Report(
        NAME,
        _conditions(options, size, models, identical.rounds),
        [
            *rows,
            *trees,
            *agent_loop.rows(2 * size.prompts),
            *(row for each in half for row in each.rows),
            *(row for row, _ in settings),
        ],
        [
            *_claims(rows, tasks),
            claimed("lookup_tree.dynamic_vs_static", worst_of(ratios, "higher"), 1.0, "higher", "+18 % (DIAA)"),
            *_replay_claims(half),
            claimed(
                "lookup_tree.worst_vs_plain",
                worst_of((relative([answers], OURS) for _, answers in settings), "higher"),
                0.97,
                "higher",
            ),
            claimed("lookup_tree.identical", identical, 1.0, "higher"),
        ],
    )


def _config(model: ModelPrompts, sampling: SamplingParams, tokens: int) -> MachineConfig:
    sampling = replace(sampling, logit_bias=dict.fromkeys(model.eos_ids, -100.0))
    return a_config("cloud", True, sampling, tokens, model.eos_ids, model.vocab_size)


async def _answered(worker: EngineWorker, way: Way, config: MachineConfig, memory: DraftMemory, prompt: Ids) -> Answer:
    config = changed(config, table=memory.table, stats=memory.stats)
    machine: Callable[[], Machine] = partial(way, config, memory)
    (answer,) = await together(worker, [machine], [prompt])
    return answer


async def _measure(
    model: ModelPrompts, by_name: Mapping[str, Way], size: Size, ending: str
) -> tuple[list[Row], dict[str, Group]]:
    """Answer every prompt with every method, in rotating order; the answers by task."""
    config = _config(model, SamplingParams(temperature=0.0), size.tokens)
    if ending != ENDINGS[0]:
        config = changed(config, sampling=SamplingParams(temperature=0.0))
    measured: dict[str, dict[str, list[Answer]]] = {}
    memories = {way: DraftMemory(model.vocab_size) for way in by_name}
    names = list(by_name)
    worker = EngineWorker(model.engine)
    await worker.start()
    try:
        for kind, prompts in model.prompts.items():
            for number, prompt in enumerate(prompts):
                first = number % len(names)
                answers = {
                    way: await _answered(worker, by_name[way], config, memories[way], prompt)
                    for way in names[first:] + names[:first]
                }
                _same_text(answers)
                for way, answer in answers.items():
                    if number >= WARM_UP or len(prompts) <= WARM_UP:
                        measured.setdefault(kind, {}).setdefault(way, []).append(answer)
    finally:
        await worker.stop()
    table = memories[OURS].table
    rows = [_row(model, kind, way, group) | {"end": ending} for kind, group in measured.items() for way in group]
    learnt: Row = {
        "model": model.name,
        "way": OURS,
        "table_bytes": sum(array.nbytes for array in table.arrays().values()),
        "vocabulary": model.vocab_size,
        "table_rows": len(table),
    }
    return [*rows, learnt], dict(measured)


def _same_text(answers: Mapping[str, Answer]) -> None:
    for way, answer in answers.items():
        if answer.tokens != answers[PLAIN].tokens:
            raise AssertionError(f"{way} has changed an answer")


def _row(model: ModelPrompts, kind: str, way: str, group: Group) -> Row:
    answers, against = group[way], relative([group], way)
    return {
        "model": model.name,
        "task": kind,
        "way": way,
        "tokens_per_s": rate(answers),
        "vs_plain": against.value,
        "interval_90": against.interval,
        "tokens_per_step": per_step(answers),
        "rows_per_step": sum(a.stats.get("rows", len(a.tokens)) for a in answers) / sum(map(forwards, answers)),
    }


async def _sizes(model: ModelPrompts, size: Size, budgets: Sequence[int]) -> tuple[list[Row], list[Estimate]]:
    """Tokens per step of trees of equal size, without timing; and dynamic trees' ÷ static ones', by size."""
    config = _config(model, SamplingParams(temperature=0.0), size.tokens)
    rows: list[Row] = []
    ratios: list[Estimate] = []
    worker = EngineWorker(model.engine)
    await worker.start()
    try:
        for budget in budgets:
            row: Row = {"model": model.name, "budget": budget}
            group: dict[str, list[Answer]] = {}
            for name, way in sized(budget).items():
                memory = DraftMemory(model.vocab_size)
                group[name] = [
                    await _answered(worker, way, config, memory, prompt)
                    for prompts in model.prompts.values()
                    for prompt in prompts[: WARM_UP + min(2, size.prompts)]
                ]
                row[name] = per_step(group[name])
            rows.append(row)
            ratios.append(steps_relative(group, "dynamic", "static"))
    finally:
        await worker.stop()
    return rows, ratios


async def _identity(model: ModelPrompts, texts: dict[str, list[str]], size: Size) -> Estimate:
    """Share of answers that equal plain decoding's: all prompts greedily, some sampled."""
    all_prompts = demo_pair(texts)
    prompts = all_prompts.every()
    cases = [(prompt, SamplingParams(temperature=0.0)) for prompt in prompts]
    cases += [(prompts[i % len(prompts)], SamplingParams(temperature=1.0, seed=i)) for i in range(size.identity)]
    by_name, memory, equal = ways(None), DraftMemory(model.vocab_size), list[bool]()
    worker = EngineWorker(all_prompts.engine)
    await worker.start()
    try:
        for prompt, sampling in cases:
            config = _config(all_prompts, sampling, min(size.tokens, 32))
            both = [await _answered(worker, by_name[way], config, memory, prompt) for way in (PLAIN, OURS)]
            equal.append(both[0].tokens == both[1].tokens)
    finally:
        await worker.stop()
    return share_of(equal)


def _claims(rows: Sequence[Row], tasks: Mapping[str, Mapping[str, Sequence[Group]]]) -> list[Claim]:
    """tasks: groups of each ending and task, one for each model."""
    by_task, natural = (tasks.get(ending, {}) for ending in ENDINGS)
    groups = [group for of_task in by_task.values() for group in of_task]
    entry_bytes = max(
        float(str(row["table_bytes"])) / float(str(row["vocabulary"])) / NUM_SUCCESSORS
        for row in rows
        if "table_bytes" in row
    )
    claims = [
        claimed(
            "lookup_tree.vs_plain", relative(groups, OURS), 2.2, "higher", "2.22x Llama-3B, 2.05x 1B, 1.78x Vicuna-7B"
        ),
        claimed("lookup_tree.worst_rank", worst_rank(by_task.values(), ABLATIONS), 2.0, "lower"),
        Claim("lookup_tree.table_bytes_per_entry", entry_bytes, 12.0, "lower", "12 (DIAA, table 4)"),
        *(
            claimed(f"lookup_tree.{name.replace(' ', '_')}", relative(groups, name, OURS), 1.0, "lower")
            for name in ABLATIONS
        ),
    ]
    if natural:
        ended = [group for of_task in natural.values() for group in of_task]
        claims.append(claimed("lookup_tree.vs_plain_natural_end", relative(ended, OURS), 1.5, "higher"))
    return claims


def _replay_claims(half: Sequence[Replayed]) -> list[Claim]:
    """Claims of checkpoints trained on real text, where the data folder has them; else of the demo's model."""
    real = half[1:] or half
    overhead = worst_of((each.overhead for each in half), "lower")
    return [
        claimed("lookup_tree.half_b_vs_plain", relative([each.answers for each in real], OURS), 2.0, "higher"),
        claimed("lookup_tree.half_b_overhead", overhead, 0.05, "lower"),
    ]


def _conditions(options: Options, size: Size, models: Sequence[ModelPrompts], compared: int) -> dict[str, object]:
    return {
        "clock": "real; adversarial engines sleep for their forward",
        "models": [model.name for model in models],
        "prompts": "Spec-Bench, first turns" if options.data else "made up, of Spec-Bench's kinds",
        "answers": f"{size.tokens} tokens, greedy; {size.prompts} a task after {WARM_UP} warm-up",
        "timed": "from the first token to the last",
        "memory": "tables and budget persist from answer to answer, separately for each method, empty at first",
        "compared": f"{compared} answers with plain decoding",
        "replayed": "24 layers, hidden 896, vocabulary 151936, bf16, random; distributions of each of the models; "
        "claimed for the checkpoints of the data folder, without one for the demo cloud model",
        "mean": "geometric, over models and tasks",
        "interval_90": "resampled prompts of each task and model",
        "adversarial_forward_s": size.forward_s,
        "quick": options.quick,
    }


def plot(report: Report) -> str:
    """Plot tokens per second relative to plain decoding, by task and method."""
    shown = [row for row in report.rows if "task" in row and row["model"] == "demo cloud" and row["end"] == ENDINGS[0]]
    return bars(shown, x="task", group="way", y="vs_plain", unit="times plain decoding", title=NAME)
