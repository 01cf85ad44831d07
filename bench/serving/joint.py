"""Targets of joint answers a second of one process, the engine's time taken out: `aggregate` with 152,000 ids.

Two sides of two documents each write answers in the simulator, so in the served machines, drivers, executor and codec,
one after the other on one thread; times are processor time. Rows are not a model's: random weights give flat ones, on
which nothing can be decided early. They follow Zipf's law with a clear first id in most, differ between documents as
DRAGON's do, and depend on the whole prefix. The engine's forward and sampling are real torch, and are timed and taken
out; what is left, over the targets, is halved: it is that of two processes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from lab.configs import a_config
from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.batching.segment import Batch
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SampledRow, SamplingParams
from paceline.engine.base import Output, SampleRequest
from paceline.engine.fake import FakeEngine
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler
from paceline.strategies.aggregate.machine import aggregate
from paceline.strategies.base import Branch
from paceline.wire.messages import AggregateOptions

from ..bootstrap import median_of
from ..findings import Findings
from ..report import Claim

EXPONENTS: Final = (1.1, 2.5)  # of Zipf's law
WINNER: Final = 4.0  # nats by which the first id of a row stands out at most
APART: Final = 0.7  # nats by which two documents differ in an id, standard deviation
POOL: Final = 48  # rows that others are made of
SAMPLINGS: Final = {
    "T 1": SamplingParams(temperature=1.0),
    "T 0.8, top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "T 0": SamplingParams(temperature=0.0),
}
CLAIMED: Final = "T 1", "document-private"


@dataclass(frozen=True, slots=True)
class Load:
    vocab: int = 151_936
    tokens: int = 64  # of an answer
    rounds: int = 6
    answers: int = 4  # at a time


class ZipfEngine(FakeEngine):
    """Rows of a real vocabulary's size as torch logits, functions of the prefix. Times what an engine does."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab_size=vocab, max_positions=100_000)
        generator = torch.Generator().manual_seed(0)
        ranks = torch.log(torch.arange(1, vocab + 1).float())
        low, high = EXPONENTS
        self._bases: list[Tensor] = []
        for _ in range(POOL):
            steep = low + (high - low) * float(torch.rand((), generator=generator))
            row = -steep * ranks[torch.randperm(vocab, generator=generator)]
            row[row.argmax()] += WINNER * float(torch.rand((), generator=generator))
            self._bases.append(row)
        self._own = [torch.randn(vocab, generator=generator) * APART for _ in range(POOL)]
        self._sampler = DeviceSampler()
        self._kept: deque[Tensor] = deque(maxlen=16)  # so that memory is freed here, as by a GPU's allocator
        self.seconds = 0.0

    def forward(self, batch: Batch) -> Output:
        begin = time.process_time()
        super().forward(batch)
        wanted = [
            self._rows[segment.seq][segment.start + row] for segment in batch.segments for row in segment.logits_rows()
        ]
        scores = torch.stack(
            [self._bases[sum(row.recent[-2:]) % POOL] + self._own[row.digest % POOL] for row in wanted]
        )
        self._kept.append(scores)
        logits, first = [], 0
        for segment in batch.segments:
            count = len(segment.logits_rows())
            logits.append(DeviceLogits(scores, first, first + count))
            first += count
        self.seconds += time.process_time() - begin
        return Output(tuple(logits))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        begin = time.process_time()
        found = self._sampler(requests)
        self.seconds += time.process_time() - begin
        return found


@dataclass(frozen=True, slots=True)
class Round:
    texts: list[list[int]]
    targets_per_s: float  # of one process
    rows_per_target: float  # of both sides, all documents
    bytes_per_target: float  # on the link, both directions


def measure(load: Load) -> Findings:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # another would wait for the engine's next call by spinning, which is not taken out
    try:
        return _measure(load)
    finally:
        torch.set_num_threads(before)


def _measure(load: Load) -> Findings:
    found = Findings()
    engines = {side: ZipfEngine(load.vocab) for side in ("cloud", "device")}
    for privacy in ("document-private", "open"):
        for name, sampling in SAMPLINGS.items():
            rounds = [
                play(load, engines, sampling, seed, private=privacy != "open", needs_dists=False)
                for seed in range(load.rounds)
            ]
            estimate = median_of([each.targets_per_s for each in rounds])
            found.rows.append(
                {
                    "sampling": name,
                    "privacy": privacy,
                    "targets_per_s": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                    "rows_per_target": statistics.median(each.rows_per_target for each in rounds),
                    "bytes_per_target": statistics.median(each.bytes_per_target for each in rounds),
                }
            )
            if (name, privacy) == CLAIMED:
                found.claim(Claim("engine.joint_targets_per_s", estimate.value, 400.0, "higher"), estimate)
    return found


def play(
    load: Load,
    engines: dict[str, ZipfEngine],
    sampling: SamplingParams,
    seed: int,
    *,
    private: bool,
    needs_dists: bool,
) -> Round:
    """Some answers, written at once. needs_dists: as for logprobs; the text is the same, from whole distributions."""
    draw = random.Random(seed)
    requests = []
    for number in range(load.answers):
        question = tuple(draw.randrange(200) for _ in range(16))
        branches = {
            side: tuple(Branch((*(draw.randrange(200) for _ in range(24)), *question), draw.random()) for _ in range(2))
            for side in engines
        }
        config = a_config(
            "cloud",
            True,
            replace(sampling, seed=1000 * seed + number),
            load.tokens,
            frozenset(),
            load.vocab,
            AggregateOptions(aggregator="mixture"),
            private=private,
            needs_dists=needs_dists,
            table=LookupTable(load.vocab),
        )
        requests.append(SimulatedRequest(aggregate, "cloud", config, branches))
    for engine in engines.values():
        engine.seconds = 0.0
    begin = time.process_time()
    simulation = Simulation(
        requests, engines, seed=seed, network=Network((0.025, 0.025)), forward={"cloud": 0.02, "device": 0.03}
    )
    simulation.run()
    seconds = time.process_time() - begin - sum(engine.seconds for engine in engines.values())
    targets = sum(len(answer.tokens) for answer in simulation.answers)
    rows = sum(host.steps.rows for host in simulation.hosts.values())
    sent = sum(each.num_bytes for each in simulation.messages)
    texts = [answer.tokens for answer in simulation.answers]
    return Round(texts, targets / (seconds / 2.0), rows / targets, sent / targets)
