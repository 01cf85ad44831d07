"""Time of a step outside the model's forward, with 64 answers in one batch: in process, without HTTP.

Processor time is that of all threads, and says on a busy machine what elapsed time does not.

Real engine, executor, thread, event loop, sessions and machines. The time from a forward's return to the next
forward's call is everything else: sampling, delivery of the tokens, machines, scheduling. Only steps in which every
answer has its full number of rows count, and only the time between two such steps. Processor time that a session takes
while a forward runs, as the default strategy's drafter does to learn, is not in it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import torch

from lab.baselines.lookup import FixedBudget
from lab.configs import a_config
from lab.engines import WrappedEngine
from paceline.core.batching.segment import Batch
from paceline.core.drafting.ngram_drafter import DraftTree, NgramDrafter
from paceline.core.sampling.sampler import SampledRow, SamplingParams
from paceline.engine.base import Engine, Output, SampleRequest
from paceline.engine.loader import load_model
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine, MachineConfig
from paceline.strategies.lookup_tree import LookupTree
from paceline.strategies.solo import Solo

from ..bootstrap import Estimate, median_of
from ..drafting.drafters import DraftMemory
from ..drafting.single_session import together
from ..findings import Findings
from ..report import Claim
from .model_files import ModelFiles
from .systems import cores

PARENTS: Final = (-1, -1, 0, 0, 1, 2, 3)  # of the drafts below an answer's head: 8 rows with the head


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes of the measurement."""

    sequences: int = 64
    prompt: int = 16  # tokens
    tokens: int = 48  # of an answer with one row a step
    tree_tokens: int = 16  # of an answer with a tree a step
    top_p: float = 0.95
    temperature: float = 0.8


class Moment(NamedTuple):
    """s, or a duration between two moments."""

    elapsed: float
    processor: float

    @staticmethod
    def now() -> Moment:
        return Moment(time.perf_counter(), time.process_time())

    def since(self, earlier: Moment) -> Moment:
        return Moment(self.elapsed - earlier.elapsed, self.processor - earlier.processor)


@dataclass(frozen=True, slots=True)
class Step:
    """A forward, and the sampling after it."""

    rows: int
    begin: Moment
    end: Moment
    sampling: list[Moment] = field(default_factory=list)  # as durations


class TimedEngine(WrappedEngine):
    """Records every forward and sampling. On a GPU each ends when the device has finished."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.steps: list[Step] = []

    def forward(self, batch: Batch) -> Output:
        begin = Moment.now()
        output = super().forward(batch)
        _finish_device()
        self.steps.append(Step(batch.num_rows, begin, Moment.now()))
        return output

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        begin = Moment.now()
        rows = super().sample(requests)
        _finish_device()
        self.steps[-1].sampling.append(Moment.now().since(begin))
        return rows


def _finish_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class FullTrees(NgramDrafter):
    """Drafter that drafts trees of random tokens of full size, after the work of the default strategy's."""

    words: range
    draw: random.Random

    def draft(self, budget: int, position: int) -> DraftTree:
        super().draft(budget, position)
        tokens = tuple(self.draw.sample(self.words, len(PARENTS)))
        return DraftTree(tokens, PARENTS, (0.5,) * len(PARENTS))


def measure(model: ModelFiles, load: Load) -> Findings:
    before = torch.get_num_threads()
    loaded = load_model(model.directory, threads=cores(), kv_rows=load.sequences * 512)
    try:
        engine = TimedEngine(loaded.engine)
        plain = asyncio.run(_steps(engine, model, load, trees=False))
        trees = asyncio.run(_steps(engine, model, load, trees=True))
    finally:
        torch.set_num_threads(before)
    tree_rows = load.sequences * (1 + len(PARENTS))
    row, host = _row("one row each", plain, load.sequences)
    tree_row, tree_host = _row("trees of 8 rows", trees, tree_rows)
    found = Findings([row, tree_row])
    found.claim(Claim(f"engine.host_ms_per_step_{load.sequences}", host.value, 5.0, "lower"), host)
    per_row = tree_host.times(1e3 / tree_rows)  # us
    found.claim(Claim("engine.host_us_per_tree_row", per_row.value, 60.0, "lower"), per_row)
    return found


async def _steps(engine: TimedEngine, model: ModelFiles, load: Load, *, trees: bool) -> list[Step]:
    """Forwards of all answers, written together."""
    tokens = load.tree_tokens if trees else load.tokens
    size = model.shape.vocab
    memory, words = DraftMemory(size), model.vocabulary.words
    draw = random.Random(0)
    machines: list[Callable[[], Machine]] = []
    for seed in range(load.sequences):
        sampling = SamplingParams(temperature=load.temperature, top_p=load.top_p, seed=seed)
        config = a_config("cloud", True, sampling, tokens, frozenset(), size, needs_dists=False)
        machines.append(partial(_tree_machine, config, memory, words, draw) if trees else partial(Solo, config))
    prompts = [tuple(draw.choices(words, k=load.prompt)) for _ in machines]
    engine.steps = []
    worker = EngineWorker(engine)
    await worker.start()
    try:
        answers = await together(worker, machines, prompts)
    finally:
        await worker.stop()
    assert all(len(answer.tokens) == tokens for answer in answers)
    return engine.steps


def _tree_machine(config: MachineConfig, memory: DraftMemory, words: range, draw: random.Random) -> Machine:
    drafter = FullTrees(memory.table, config.output.sampling, stats=memory.stats.drafter)
    drafter.words, drafter.draw = words, draw
    return LookupTree(config, drafter=drafter, budget=FixedBudget(len(PARENTS)))


def _row(way: str, steps: Sequence[Step], full: int) -> tuple[dict[str, object], Estimate]:
    """Times of the steps of `full` rows that are followed by another such step, in ms."""
    pairs = [(step, following) for step, following in pairwise(steps) if step.rows == following.rows == full]
    if not pairs:
        raise AssertionError(f"no two steps in a row have {full} rows: {[step.rows for step in steps]}")
    host = [following.begin.since(step.end) for step, following in pairs]
    sampling = [Moment(*map(sum, zip(*step.sampling, strict=True))) for step, _ in pairs]
    forward = [step.end.since(step.begin) for step, _ in pairs]
    beside = [whole.since(part) for whole, part in zip(host, sampling, strict=True)]
    estimate = median_of([1e3 * each.elapsed for each in host])
    row: dict[str, object] = {
        "part": "host",
        "way": way,
        "rows": full,
        "steps": len(pairs),
        "host_ms": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "us_per_row": 1e3 * estimate.value / full,
    }
    for name, times in (("forward", forward), ("host", host), ("sampling", sampling), ("beside_sampling", beside)):
        row[f"{name}_ms"] = statistics.median(1e3 * each.elapsed for each in times)
        row[f"{name}_least_ms"] = min(1e3 * each.elapsed for each in times)
        row[f"{name}_cpu_ms"] = statistics.median(1e3 * each.processor for each in times)
    return row, estimate
