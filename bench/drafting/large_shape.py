"""What acceptance is worth on a larger model: a random-weight engine of 0.5B shape that says what a small one said.

Its forward is computed in full, and takes what it takes; then each row on the text that the small model wrote gets
that model's law, spread over the large vocabulary. So drafts stand exactly as often as they did for the small model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, ModelInfo, Output
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.engine.wrappers import WrappedEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine, MachineConfig

from ..engine import QUICK, Workload, random_model
from .drafters import OURS, PLAIN, Memory, ways
from .single_session import Answer, together
from .workloads import Ids, Subject

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """A small model's greedy answer: its tokens after a prompt, and its law after each token from the prompt's last."""

    prompt: Ids
    tokens: Ids
    laws: tuple[Dist, ...]  # laws[i] after i tokens of the answer

    @staticmethod
    def of(engine: Engine, prompt: Ids, count: int) -> Trace:
        seq = SeqId(1)
        tokens: list[int] = []
        laws: list[Dist] = []
        rows: tuple[int, ...] = prompt
        for _ in range(count + 1):
            laws.append(engine.forward(Batch((Segment(seq, engine.length(seq), rows),))).dists[0][-1])
            rows = (laws[-1].argmax(),)
            tokens.append(rows[0])
        engine.release(seq)
        return Trace(prompt, tuple(tokens), tuple(laws))


class Replay(WrappedEngine):
    """`inner`'s forwards, the trace's laws. One sequence at a time; a row beside the trace gets the law of the last
    place with the same token, or the first law where there is none."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.seconds = 0.0  # in forwards so far, without those of prompts
        self._laws: list[Dist] = []
        self._text: Ids = ()
        self._first = 0  # the first row that has a law
        self._by_token: dict[int, int] = {}

    def play(self, trace: Trace) -> None:
        size = self.info.vocab_size
        self._text = (*trace.prompt, *trace.tokens)
        self._first = len(trace.prompt) - 1
        self._laws = [_spread(law, size) for law in trace.laws]
        self._by_token = {token: place for place, token in enumerate(trace.tokens[:-1], start=1)}

    def forward(self, batch: Batch) -> Output:
        began = time.perf_counter()
        super().forward(batch)
        if batch.segments[0].start > self._first:  # not a part of a long prompt
            self.seconds += time.perf_counter() - began
        return Output(tuple(self._said(segment) for segment in batch.segments))

    def _said(self, segment: Segment) -> tuple[Dist, ...]:
        positions = segment.positions()
        true: list[bool] = []
        for row, (token, position) in enumerate(zip(segment.tokens, positions, strict=True)):
            parent = row - 1 if segment.parents is None else segment.parents[row]
            on_path = parent < 0 or true[parent]
            true.append(on_path and position < len(self._text) and self._text[position] == token)
        return tuple(self._law(segment.tokens[row], positions[row], true[row]) for row in segment.logits_rows())

    def _law(self, token: int, position: int, true: bool) -> Dist:
        place = position - self._first if true else self._by_token.get(token, 0)
        return self._laws[min(max(place, 0), len(self._laws) - 1)]


def _spread(law: Dist, size: int) -> Dist:
    probs = np.full(size, 1e-9)
    probs[: len(law.probs)] += law.probs
    return Dist.dense(probs / probs.sum())


def measure(
    subject: Subject, *, tokens: int, prompts: int, quick: bool
) -> tuple[list[dict[str, object]], float, float]:
    """Rows, tokens per second beside plain, and the machinery's seconds per second of its forwards."""
    load = replace(QUICK, layers=24) if quick else Workload()
    model = random_model(load)
    info = ModelInfo("0.5B", "", load.vocab, 2048, str(load.dtype), "paged")
    engine = paged_engine(model, info, kv_rows=4096)
    if not isinstance(engine, PagedEngine):
        raise EngineError(f"paged does not serve the bench's model: {engine}")
    by_turns = [prompt for some in zip(*subject.prompts.values(), strict=False) for prompt in some]
    traces = [Trace.of(subject.engine, prompt, tokens) for prompt in by_turns[: prompts + 1]]
    return asyncio.run(_play(Replay(engine), traces, tokens))


async def _play(replay: Replay, traces: Sequence[Trace], tokens: int) -> tuple[list[dict[str, object]], float, float]:
    """The first trace warms both up."""
    size = replay.info.vocab_size
    task = MachineConfig("cloud", True, GREEDY, tokens, frozenset(), size)
    make = ways(None)
    memories = {way: Memory(size) for way in (PLAIN, OURS)}
    told: dict[str, list[Answer]] = {way: [] for way in memories}
    computed: dict[str, list[float]] = {way: [] for way in memories}
    worker = EngineWorker(replay)
    await worker.start()
    try:
        for number, trace in enumerate(traces):
            replay.play(trace)
            for way, memory in memories.items():
                before = replay.seconds
                known = replace(task, stats=memory.experience, table=memory.table)
                machine: Callable[[], Machine] = partial(make[way], known, memory)
                (answer,) = await together(worker, [machine], [trace.prompt])
                if tuple(answer.tokens) != trace.tokens[:tokens]:
                    raise AssertionError(f"{way} did not say what was to be replayed")
                if number:
                    told[way].append(answer)
                    computed[way].append(replay.seconds - before)
    finally:
        await worker.stop()
    rates = {way: sum(a.timed for a in given) / sum(a.seconds for a in given) for way, given in told.items()}
    beside = {way: sum(a.seconds for a in told[way]) / sum(computed[way]) - 1.0 for way in told}
    rows: list[dict[str, object]] = [
        {
            "model": "0.5B, replayed",
            "way": way,
            "tokens_per_s": rates[way],
            "vs_plain": rates[way] / rates[PLAIN],
            "tokens_per_step": sum(a.timed for a in given) / sum(_steps(a) for a in given),
            "beside_the_forward": beside[way],
        }
        for way, given in told.items()
    ]
    return rows, rates[OURS] / rates[PLAIN], beside[OURS]


def _steps(answer: Answer) -> float:
    """Forwards after the prompt's."""
    return answer.stats.get("forwards", len(answer.tokens)) - 1
