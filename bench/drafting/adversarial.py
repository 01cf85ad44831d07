"""Twenty settings in which drafting does not pay, or stops paying: tests of the adaptive draft budget.

The engine follows a script, so that no draft is accepted, or only those of a trap. Its forwards sleep for a given time,
and each further row for a fraction of it. All else is the program's own code, in real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import msgspec
import numpy as np

from lab.configs import a_config, changed
from paceline.api.http.server import freeze_heap
from paceline.core.batching.segment import Batch
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Output
from paceline.engine.fake import FakeEngine
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.strategies.base import Machine

from .drafters import OURS, PLAIN, DraftMemory, ways
from .placing_engine import PlacingEngine
from .single_session import Answer, together
from .speeds import rate, relative

Kind = Literal["random", "trap", "bait"]

SMALL, HUGE = 2048, 151936  # vocabularies
PROMPT: Final = 24  # tokens
TRAPPED: Final = 48  # repeating tokens before the random ones
BEYOND: Final = 512  # tokens of the script after the answer, for draft positions


@dataclass(frozen=True, slots=True)
class Setting:
    kind: Kind
    row: float  # time of each further row, as a fraction of a forward
    vocab: int = SMALL
    batch: int = 1
    tokens: int = 128


SETTINGS: Final = (
    *(Setting(kind, row) for kind in ("random", "trap", "bait") for row in (0.005, 0.1, 1.0)),
    *(Setting("random", row, vocab=HUGE) for row in (0.005, 0.1, 1.0)),
    Setting("trap", 0.1, vocab=HUGE),
    *(Setting("random", row, batch=16, tokens=64) for row in (0.005, 0.1, 1.0)),
    Setting("trap", 0.1, batch=16, tokens=96),
    Setting("bait", 0.1, batch=16, tokens=64),
    Setting("random", 0.02, vocab=HUGE, batch=16, tokens=64),
    Setting("random", 0.3, tokens=32),  # short answers
)


class Scripted(PlacingEngine):
    """Engine whose next token is nearly always the script's token of the position, whatever the row's token is."""

    def __init__(self, setting: Setting, forward_s: float) -> None:
        super().__init__(FakeEngine(vocab_size=setting.vocab))
        self._setting, self._forward_s = setting, forward_s
        self._flat = np.full(setting.vocab, 0.05 / setting.vocab)
        self._script: list[int] = []
        self.start_script(0)

    def start_script(self, number: int) -> None:
        """Start another script, unrelated to the previous ones."""
        length = PROMPT + self._setting.tokens + BEYOND
        noise = np.random.default_rng(number).integers(8, self._setting.vocab, length)
        self._script = [self._token(position, int(noise[position])) for position in range(length)]

    def forward(self, batch: Batch) -> Output:
        start = time.perf_counter()
        placed = self.run(Batch(tuple(msgspec.structs.replace(segment, logits="none") for segment in batch.segments)))
        dists = tuple(
            tuple(self._dist(each.positions()[row]) for row in segment.logits_rows())
            for each, segment in zip(placed, batch.segments, strict=True)
        )
        num_scored = sum(map(len, dists))
        remaining = start + self._forward_s * (1.0 + self._setting.row * (num_scored - 1)) - time.perf_counter()
        time.sleep(max(0.0, remaining))
        return Output.dense(dists)

    def prompt(self) -> tuple[int, ...]:
        return tuple(self._script[:PROMPT])

    def _dist(self, position: int) -> Dist:
        probs = self._flat.copy()
        probs[self._script[position + 1]] += 0.95
        return Dist.dense(probs)

    def _token(self, position: int, random: int) -> int:
        match self._setting.kind:
            case "trap" if position < PROMPT + TRAPPED:
                return position % 4
            case "bait" if position % 2:
                return 1
            case _:
                return random


async def measure(
    setting: Setting, *, forward_s: float, rounds: int
) -> tuple[dict[str, object], Mapping[str, Sequence[Answer]]]:
    """A row, and the answers of both methods, alternating. Ours keeps its learnt state from round to round."""
    engine = Scripted(setting, forward_s / setting.batch if setting.row >= 1.0 else forward_s)
    sampling = SamplingParams(temperature=0.0)
    config = a_config("cloud", True, sampling, setting.tokens, frozenset(), setting.vocab)
    by_name, memory = ways(None), DraftMemory(setting.vocab)
    config = changed(config, table=memory.table, stats=memory.stats)
    measured: dict[str, list[Answer]] = {PLAIN: [], OURS: []}
    worker = EngineWorker(engine)
    await worker.start()
    try:
        with freeze_heap():  # as in the programs
            for number in range(rounds):
                engine.start_script(number)
                for way, answers in measured.items():
                    machine: Callable[[], Machine] = partial(by_name[way], config, memory)
                    answers += await together(worker, [machine] * setting.batch, [engine.prompt()] * setting.batch)
    finally:
        await worker.stop()
    found = relative([measured], OURS)
    row: dict[str, object] = {
        "setting": f"{setting.kind}, a row {setting.row:g} of a forward",
        "vocabulary": setting.vocab,
        "batch": setting.batch,
        "tokens": setting.tokens,
        "vs_plain": found.value,
        "interval_90": found.interval,
        "tokens_per_s": rate(measured[OURS]),
        "draft_steps": sum(a.stats["draft_steps"] for a in measured[OURS]),
        "plain_steps": sum(a.stats["plain_steps"] for a in measured[OURS]),
    }
    return row, measured
