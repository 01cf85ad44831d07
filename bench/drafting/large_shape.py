"""Speed-up by drafts on a larger model: a random-weight engine of 0.5B shape that replays a small model's answers.

Its forwards are computed in full and timed; then each row along the small model's text gets that model's distribution,
extended to the large vocabulary. Thus drafts are accepted exactly as often as for the small model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lab.configs import a_config, changed
from paceline.core.batching.segment import Batch, PlacedSegment, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, ModelInfo, Output
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine

from ..bootstrap import Estimate, estimate
from ..random_model import Shape, random_model
from .drafters import OURS, PLAIN, DraftMemory, ways
from .placing_engine import PlacingEngine
from .single_session import Answer, together
from .speeds import per_step, rate, relative
from .workloads import Ids, ModelPrompts

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy answer of a small model, with its distributions from the prompt's last token on."""

    prompt: Ids
    tokens: Ids
    dists: tuple[Dist, ...]  # dists[i] after i tokens of the answer

    @staticmethod
    def of(engine: Engine, prompt: Ids, count: int) -> Trace:
        seq = SeqId(1)
        tokens: list[int] = []
        dists: list[Dist] = []
        rows: tuple[int, ...] = prompt
        for _ in range(count + 1):
            dists.append(engine.forward(Batch((Segment(seq, engine.length(seq), rows),))).dists[0][-1])
            rows = (dists[-1].argmax(),)
            tokens.append(rows[0])
        engine.release(seq)
        return Trace(prompt, tuple(tokens), tuple(dists))


class Replay(PlacingEngine):
    """Forwards of `inner` with distributions of the trace. One sequence at a time.

    A row off the trace gets the distribution after the last occurrence of its token, or the first distribution.
    """

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.seconds = 0.0  # of all forwards so far, without prefills
        self._dists: list[Dist] = []
        self._text: Ids = ()
        self._first = 0  # the first row with a distribution
        self._by_token: dict[int, int] = {}

    def play(self, trace: Trace) -> None:
        size = self.info.vocab_size
        self._text = (*trace.prompt, *trace.tokens)
        self._first = len(trace.prompt) - 1
        self._dists = [_extended(dist, size) for dist in trace.dists]
        self._by_token = {token: i for i, token in enumerate(trace.tokens[:-1], start=1)}

    def forward(self, batch: Batch) -> Output:
        start = time.perf_counter()
        placed = self.run(batch)
        if batch.segments[0].start > self._first:  # not a chunk of the prompt
            self.seconds += time.perf_counter() - start
        return Output.dense(self._replayed(segment) for segment in placed)

    def _replayed(self, segment: PlacedSegment) -> tuple[Dist, ...]:
        assert not segment.num_open_rows, "trees are scored at once"
        positions = segment.positions()
        on_trace: list[bool] = []
        for row, (token, position) in enumerate(zip(segment.tokens, positions, strict=True)):
            parent = row - 1 if segment.parents is None else segment.parents[row]
            is_continuation = parent < 0 or on_trace[parent]
            on_trace.append(is_continuation and position < len(self._text) and self._text[position] == token)
        return tuple(self._dist(segment.tokens[row], positions[row], on_trace[row]) for row in segment.wanted)

    def _dist(self, token: int, position: int, on_trace: bool) -> Dist:
        index = position - self._first if on_trace else self._by_token.get(token, 0)
        return self._dists[min(max(index, 0), len(self._dists) - 1)]


def _extended(dist: Dist, size: int) -> Dist:
    """The distribution over a larger vocabulary."""
    probs = np.full(size, 1e-9)
    probs[: len(dist.probs)] += dist.probs
    return Dist.dense(probs / probs.sum())


@dataclass(frozen=True, slots=True)
class Replayed:
    """Answers of plain decoding and of ours with one small model's acceptance."""

    rows: list[dict[str, object]]
    answers: Mapping[str, Sequence[Answer]]
    overhead: Estimate  # of ours: seconds beside the forwards ÷ seconds in them


def measure(models: Sequence[ModelPrompts], *, tokens: int, prompts: int) -> list[Replayed]:
    """Replay answers of each of the small models on one engine of 0.5B shape."""
    shape, dtype = Shape(), torch.bfloat16
    model = random_model(shape, dtype)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    info = ModelInfo("0.5B", "", shape.vocab, 2048, str(dtype), "paged")
    engine = paged_engine(model, info, kv_rows=4096)
    if not isinstance(engine, PagedEngine):
        raise EngineError(f"paged does not serve the bench's model: {engine}")
    found: list[Replayed] = []
    for small in models:
        prompts_by_turns = [prompt for group in zip(*small.prompts.values(), strict=False) for prompt in group]
        traces = [Trace.of(small.engine, prompt, tokens) for prompt in prompts_by_turns[: prompts + 1]]
        found.append(asyncio.run(_play(small.name, Replay(engine), traces, tokens)))
    return found


async def _play(small: str, replay: Replay, traces: Sequence[Trace], tokens: int) -> Replayed:
    """Both methods on all traces; the first trace is a warm-up."""
    size = replay.info.vocab_size
    config = a_config("cloud", True, GREEDY, tokens, frozenset(), size)
    by_name = ways(None)
    memories = {way: DraftMemory(size) for way in (PLAIN, OURS)}
    answers: dict[str, list[Answer]] = {way: [] for way in memories}
    computed: dict[str, list[float]] = {way: [] for way in memories}
    worker = EngineWorker(replay)
    await worker.start()
    try:
        for number, trace in enumerate(traces):
            replay.play(trace)
            for way, memory in memories.items():
                before = replay.seconds
                own_config = changed(config, stats=memory.stats, table=memory.table)
                machine: Callable[[], Machine] = partial(by_name[way], own_config, memory)
                (answer,) = await together(worker, [machine], [trace.prompt])
                if tuple(answer.tokens) != trace.tokens[:tokens]:
                    raise AssertionError(f"{way} did not write the replayed text")
                if number:
                    answers[way].append(answer)
                    computed[way].append(replay.seconds - before)
    finally:
        await worker.stop()
    overhead = {way: _beside(answers[way], computed[way]) for way in answers}
    rows: list[dict[str, object]] = []
    for way, of_way in answers.items():
        against = relative([answers], way)
        rows.append(
            {
                "model": f"0.5B, replayed {small}",
                "way": way,
                "tokens_per_s": rate(of_way),
                "vs_plain": against.value,
                "interval_90": against.interval,
                "tokens_per_step": per_step(of_way),
                "beside_the_forward": overhead[way].value,
            }
        )
    return Replayed(rows, answers, overhead[OURS])


def _beside(answers: Sequence[Answer], computed: Sequence[float]) -> Estimate:
    return estimate(
        len(answers),
        lambda among: sum(answers[i].seconds for i in among) / sum(computed[i] for i in among) - 1.0,
    )
