"""`lookup_tree` against `autoregressive` with 1, 16 and 64 answers at once: `python -m bench.drafting.many_answers`.

Real engine, thread, event loop, sessions and machines, without HTTP. In a round both write the same answers, one after
the other, in alternating order; tables and statistics are kept from round to round, as in a server. Figures are
all tokens of all answers ÷ seconds from their begin to the end of the last, prefills included, and the median of the
ratios within rounds; `cpu_vs_plain` is the same of the process's CPU time, on which other work has less influence. The
demo's device model, and a small random model over 151,936 ids; greedy text repeats itself,
text at temperature 1 does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from lab.configs import a_config, changed
from lab.engines import WrappedEngine
from paceline.api.http.server import freeze_heap
from paceline.core.batching.segment import Batch
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, ModelInfo, Output
from paceline.engine.loader import load_model
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.errors import EngineError
from paceline.models import DEVICE
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine, MachineConfig

from ..bootstrap import ratio_of
from ..random_model import Shape, random_model, spread_logits
from .drafters import OURS, PLAIN, DraftMemory, ways
from .single_session import Answer, together

SMALL: Final = Shape(layers=2, hidden=128, inner=256, heads=4, kv_heads=2, positions=2048, small=True)
PROMPT: Final = 32  # tokens
TEXTS: Final = {"repetitive": 0.0, "not repetitive": 1.0}  # temperature


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    engine: Engine
    words: Sequence[int]  # ids that prompts consist of
    banned: frozenset[int] = frozenset()


@dataclass(slots=True)
class Played:
    """All answers of one way in one round."""

    answers: list[Answer]
    seconds: float
    cpu_s: float  # of the process
    forward_s: float
    steps: int
    rows: int

    @property
    def rate(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


class CountedEngine(WrappedEngine):
    """Counts forwards, their rows and their seconds."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.clear()

    def clear(self) -> None:
        self.seconds, self.steps, self.rows = 0.0, 0, 0

    def forward(self, batch: Batch) -> Output:
        begin = time.perf_counter()
        output = super().forward(batch)
        self.seconds += time.perf_counter() - begin
        self.steps += 1
        self.rows += batch.num_rows
        return output


def demo() -> Model:
    loaded = load_model(DEVICE, threads=1, kv_rows=1 << 15)
    words = loaded.tokenizer.encode("What do you know about the harbour, its lighthouse and the old town by the sea?")
    return Model("demo device", loaded.engine, words, loaded.tokenizer.eos_ids)


def large_vocabulary() -> Model:
    model = random_model(SMALL, torch.float32)
    spread_logits(model, range(512, SMALL.vocab))
    info = ModelInfo("random", "", SMALL.vocab, SMALL.positions, "float32", "paged")
    engine = paged_engine(model, info, kv_rows=1 << 15)
    if not isinstance(engine, PagedEngine):
        raise EngineError(f"paged does not serve the bench's model: {engine}")
    return Model("random, 151,936 ids", engine, range(512, SMALL.vocab))


MODELS: Final[dict[str, Callable[[], Model]]] = {"demo": demo, "large": large_vocabulary}


async def measure(
    model: Model, text: str, count: int, *, rounds: int, tokens: int, overlap: bool = True
) -> dict[str, object]:
    """A row: both ways at one number of answers. Two rounds more come first, in which tables and estimates begin."""
    size, engine, draw = model.engine.info.vocab_size, CountedEngine(model.engine), random.Random(count)
    by_name = ways(None)
    ours = OURS if overlap else "without overlap"
    memory = DraftMemory(size)
    played: dict[str, list[Played]] = {PLAIN: [], ours: []}
    worker = EngineWorker(engine)
    await worker.start()
    try:
        with freeze_heap():  # as in the programs
            for number in range(-2, rounds):
                prompts = [tuple(draw.choices(model.words, k=PROMPT)) for _ in range(count)]
                order = list(played) if number % 2 else list(played)[::-1]
                round_played = {}
                for way in order:
                    configs = [_config(model, text, tokens, seed, memory) for seed in range(count)]
                    machines = [partial(by_name[way], config, memory) for config in configs]
                    round_played[way] = await _play(worker, engine, machines, prompts)
                texts = [[answer.tokens for answer in of_way.answers] for of_way in round_played.values()]
                assert texts[0] == texts[1], "drafts have changed the text"
                for way, each in round_played.items():
                    if number >= 0:
                        played[way].append(each)
    finally:
        await worker.stop()
    ratio = ratio_of([each.rate for each in played[ours]], [each.rate for each in played[PLAIN]])
    cpu = ratio_of([each.cpu_s for each in played[PLAIN]], [each.cpu_s for each in played[ours]])
    row: dict[str, object] = {
        "model": model.name,
        "text": text,
        "answers": count,
        "vs_plain": round(ratio.value, 3),
        "interval_90": ratio.interval,
        "cpu_vs_plain": round(cpu.value, 3),
        "cpu_interval_90": cpu.interval,
    }
    for way, name in ((PLAIN, "plain"), (ours, "ours")):
        of_way = played[way]
        row[f"{name}_tokens_per_s"] = round(statistics.median(each.rate for each in of_way))
        row[f"{name}_step_ms"] = round(statistics.median(1e3 * each.seconds / each.steps for each in of_way), 2)
        row[f"{name}_host_ms"] = round(
            statistics.median(1e3 * (each.seconds - each.forward_s) / each.steps for each in of_way), 2
        )
        row[f"{name}_rows"] = round(sum(each.rows for each in of_way) / sum(each.steps for each in of_way), 1)
    for key in ("draft_steps", "plain_steps", "tries", "drafted", "accepted", "kept"):
        row[key] = round(statistics.fmean(a.stats.get(key, 0.0) for each in played[ours] for a in each.answers), 2)
    return row


def _config(model: Model, text: str, tokens: int, seed: int, memory: DraftMemory) -> MachineConfig:
    bias = dict.fromkeys(model.banned, -100.0)
    sampling = SamplingParams(temperature=TEXTS[text], seed=seed, logit_bias=bias)
    config = a_config("cloud", True, sampling, tokens, model.banned, model.engine.info.vocab_size, needs_dists=False)
    return changed(config, table=memory.table, stats=memory.stats)


async def _play(
    worker: EngineWorker,
    engine: CountedEngine,
    machines: Sequence[Callable[[], Machine]],
    prompts: Sequence[Sequence[int]],
) -> Played:
    engine.clear()
    begin, cpu = time.perf_counter(), time.process_time()
    answers = await together(worker, machines, prompts)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return Played(answers, seconds, cpu_s, engine.seconds, engine.steps, engine.rows)


def rows(arguments: argparse.Namespace) -> Iterable[dict[str, object]]:
    for name in arguments.models:
        model = MODELS[name]()
        for text in TEXTS:
            if arguments.text in (None, text):
                for count in arguments.answers:
                    yield asyncio.run(
                        measure(
                            model,
                            text,
                            count,
                            rounds=arguments.rounds,
                            tokens=arguments.tokens,
                            overlap=not arguments.without_overlap,
                        )
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--text", choices=list(TEXTS), help="default: all")
    parser.add_argument("--answers", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--without-overlap", action="store_true", help="lessons before the next forward")
    torch.set_num_threads(1)
    for row in rows(parser.parse_args()):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
