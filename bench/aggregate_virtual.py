"""`paceline bench aggregate_virtual`: joint answers on the machines that serve, in virtual time: no other work counts.

Against the device alone by its default, with what earlier answers taught and without; sixteen answers that share steps;
trees against the best that their rows and the text allow; bytes of whole answers.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

from lab.baselines.dragon import SHAPES
from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from lab.simulation.host import StepCost
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams, top_by_score
from paceline.core.side import SIDES, Side
from paceline.engine.base import Engine
from paceline.engine.fake import VOCAB, FakeEngine
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DEFAULT_OPTIONS, AggregateOptions, DraftLimits, Options

from .aggregation import session_bytes
from .aggregation.session_bytes import BRANCHES, LEVELS, PACES, ROW_S, SPREAD
from .aggregation.wide_engine import VOCAB as WIDE
from .bootstrap import Estimate, estimate, ratio_of, worst_of
from .findings import Findings, claimed
from .report import Options as BenchOptions
from .report import Report

NAME = "aggregate_virtual"
SUMMARY = "joint answers in virtual time: against the device, sixteen at once, trees and their bound, bytes"

NEAR: Final = 0.05  # s, round trip
FAR: Final = 0.3
AT_ONCE: Final = 16
RANKS: Final = 4  # of a side's likeliest tokens: further ones are hardly drafted


@dataclass(frozen=True, slots=True)
class Load:
    tokens: int = 32
    warm: int = 3  # answers that only teach
    answers: int = 16  # after them
    rounds: int = 2  # of several at once, after one that only teaches
    sizes: int = 16  # answers whose bytes are counted


QUICK: Final = Load(12, 1, 2, 1, 1)


@dataclass(frozen=True, slots=True)
class Way:
    strategy: str
    options: Options = DEFAULT_OPTIONS
    private: bool = False


def joint(level: str, drafting: DraftLimits = SHAPES["tree"]) -> Way:
    return Way("aggregate", AggregateOptions(aggregator="mixture", drafting=drafting), level != "open")


DEFAULT: Final = Way("lookup_tree")


@dataclass
class Learnt:
    """State that each side keeps from answer to answer."""

    stats: Mapping[Side, OnlineStats] = field(default_factory=lambda: {side: OnlineStats() for side in SIDES})
    tables: Mapping[Side, LookupTable] = field(default_factory=lambda: {side: LookupTable(VOCAB) for side in SIDES})

    def forget_texts(self) -> None:
        self.tables = {side: LookupTable(VOCAB) for side in SIDES}


@dataclass(frozen=True, slots=True)
class Written:
    tokens: tuple[int, ...]
    s_per_token: float  # after the first


def write(
    way: Way, forward: Mapping[Side, float], trip: float, learnt: Learnt, tokens: int, seeds: Sequence[int]
) -> list[Written]:
    """Answers to clients of the device, one for each seed, all at once."""
    requests = []
    for seed in seeds:
        config = a_config("device", True, SamplingParams(seed=seed), tokens, frozenset(), VOCAB, way.options)
        config = changed(
            config,
            private=way.private,
            needs_dists=False,
            stats=learnt.stats["device"],
            table=learnt.tables["device"],
        )
        requests.append(SimulatedRequest(STRATEGIES[way.strategy], "device", config, BRANCHES))
    world = Simulation(
        requests,
        engines(),
        seed=seeds[0],
        network=Network((trip / 2.0, trip / 2.0)),
        forward={side: StepCost(forward[side], ROW_S) for side in SIDES},
    )
    for index in range(len(requests) if STRATEGIES[way.strategy].needs_peer else 0):
        session = world.session("cloud", index)
        own = changed(session.request.config, stats=learnt.stats["cloud"], table=learnt.tables["cloud"])
        session.request = replace(session.request, config=own)
    began: dict[int, float] = {}
    ended: dict[int, float] = {}

    def look(world: Simulation) -> None:
        for index, answer in enumerate(world.answers):
            if answer.tokens:
                began.setdefault(index, world.now)
            if len(answer.tokens) == tokens:
                ended.setdefault(index, world.now)

    world.run(look, checks=False)
    look(world)
    return [
        Written(tuple(answer.tokens), (ended[index] - began[index]) / (tokens - 1))
        for index, answer in enumerate(world.answers)
    ]


def engines() -> Mapping[str, Engine]:
    return {side: FakeEngine(seed=1, spread=SPREAD) for side in SIDES}


def run(options: BenchOptions) -> Report:
    load = QUICK if options.quick else Load()
    found = Findings()
    for part in (against_device, together, against_bound, session):
        part(load, found)
    conditions = {
        "clock": "virtual",
        "model": f"seeded tables over bytes, spread {SPREAD}; one document a side, temperature 1, asked at the device",
        "forward_s": {pace: dict(forward) for pace, forward in PACES.items()},
        "row_s": ROW_S,
        "timed": "from the first token to the last, for the link without limit of rate",
        "answers": f"{load.answers} of {load.tokens} tokens, after {load.warm} that only teach",
        "interval_90": "answers to the same seed, resampled; the worst over paces and levels",
        "bytes": f"all messages of a session but its opening, {WIDE} ids",
        "quick": options.quick,
    }
    return Report(NAME, conditions, found.rows, found.claims)


def against_device(load: Load, found: Findings) -> None:
    """Both with what earlier answers to the same question taught, and both without."""
    for name, keeps in (("vs_device_default_50ms", True), ("vs_device_default_50ms_cold", False)):
        ratios = []
        for pace, forward in PACES.items():

            def taken(way: Way, forward: Mapping[Side, float] = forward, keeps: bool = keeps) -> list[float]:
                learnt, seconds = Learnt(), list[float]()
                for seed in range(load.warm + load.answers):
                    seconds += [each.s_per_token for each in write(way, forward, NEAR, learnt, load.tokens, [seed])]
                    if not keeps:
                        learnt.forget_texts()
                return seconds[load.warm :]

            alone = taken(DEFAULT)
            for level in LEVELS:
                seconds = taken(joint(level))
                ratios.append(ratio_of(seconds, alone))
                row = {"part": "device", "pace": pace, "level": level, "tables": "warm" if keeps else "cold"}
                times = {"ms": 1e3 * statistics.median(seconds), "device_ms": 1e3 * statistics.median(alone)}
                found.rows.append(row | times | {"ratio": ratios[-1].value, "interval_90": ratios[-1].interval})
        aim = 1.35 if keeps else None
        found.claim(claimed(f"aggregate.virtual_{name}", worst_of(ratios, "lower"), aim, "lower"))


def together(load: Load, found: Findings) -> None:
    """Sixteen at once, which share every step, each further row of it at its price."""
    forward = PACES["equal"]

    def taken(way: Way) -> list[float]:
        learnt, seconds = Learnt(), list[float]()
        for number in range(1 + load.rounds):
            seeds = range(100 * number, 100 * number + AT_ONCE)
            seconds += [each.s_per_token for each in write(way, forward, FAR, learnt, load.tokens, seeds)]
        return seconds[AT_ONCE:]

    against: dict[str, list[Estimate]] = {"token_wise": [], "device_default": []}
    alone = taken(DEFAULT)
    for level in LEVELS:
        trees, steps = taken(joint(level)), taken(joint(level, SHAPES["none"]))
        against["token_wise"].append(ratio_of(trees, steps))
        against["device_default"].append(ratio_of(trees, alone))
        times = zip(("ms", "token_wise_ms", "device_ms"), (trees, steps, alone), strict=True)
        row: dict[str, object] = {"part": f"{AT_ONCE} at once", "level": level}
        found.rows.append(row | {name: 1e3 * statistics.median(seconds) for name, seconds in times})
    for to, aim in (("token_wise", 0.25), ("device_default", 2.0)):
        name = f"aggregate.virtual_wide_vs_{to}_{AT_ONCE}"
        found.claim(claimed(name, worst_of(against[to], "lower"), aim, "lower"))


def against_bound(load: Load, found: Findings) -> None:
    """Time of trees, of that of chains, beside what the same rows could do for the same texts: a round trip and a
    forward for each stretch of the text that lies in the drafts of both sides, were these the likeliest by the rates of
    each rank in this run."""
    bounds = []
    for level in LEVELS:
        trees, chains = (_drafted(load, level, SHAPES[shape]) for shape in ("tree", "chain"))
        texts = [each.tokens for each in trees]
        if texts != [each.tokens for each in chains]:
            raise AssertionError("the drafts' shape has changed a text")
        ranks = {side: [ranks_of(side, seed, text) for seed, text in enumerate(texts, load.warm)] for side in SIDES}
        rates = {side: rates_of(ranks[side]) for side in SIDES}
        in_flight = int(FAR / PACES["equal"]["cloud"])  # forwards
        tree, chain = (
            {side: likeliest(rates[side][:width], limits.rows * in_flight, limits.ahead) for side in SIDES}
            for limits, width in ((SHAPES["tree"], RANKS), (SHAPES["chain"], 1))
        )
        answers = [{side: ranks[side][i] for side in SIDES} for i in range(len(texts))]
        series = (
            [each.s_per_token for each in trees],
            [each.s_per_token for each in chains],
            [round_trips(tree, answer) for answer in answers],
            [round_trips(chain, answer) for answer in answers],
        )

        def over(among: Sequence[int], series: Sequence[Sequence[float]] = series) -> float:
            trees, chains, least_trees, least_chains = (sum(each[i] for i in among) for each in series)
            return (trees / chains) / (least_trees / least_chains)

        bounds.append(estimate(len(texts), over))
        sums = [sum(each) for each in series]
        row: dict[str, object] = {"part": "bound", "level": level, "tree_vs_chain": sums[0] / sums[1]}
        row |= {"bound": sums[2] / sums[3], "ratio": bounds[-1].value, "interval_90": bounds[-1].interval}
        found.rows.append(row | {f"rates_{side}": [round(rate, 3) for rate in rates[side]] for side in SIDES})
    found.claim(claimed("aggregate.tree_vs_bound", worst_of(bounds, "lower"), 1.1, "lower"))


def _drafted(load: Load, level: str, limits: DraftLimits) -> list[Written]:
    """Answers over the long link, on equal sides, after those that only teach."""
    learnt = Learnt()
    written = [
        write(joint(level, limits), PACES["equal"], FAR, learnt, load.tokens, [seed])[0]
        for seed in range(load.warm + load.answers)
    ]
    return written[load.warm :]


def ranks_of(side: Side, seed: int, text: Sequence[int]) -> list[int]:
    """Rank of each token of the text among those that the side expected, up to `RANKS`."""
    prompt = BRANCHES[side][0].prompt
    (dists,) = engines()[side].forward(Batch((Segment(SeqId(1), 0, (*prompt, *text[:-1]), None, len(text)),))).dists
    sampling = SamplingParams(seed=seed)
    found = []
    for position, (dist, token) in enumerate(zip(dists, text, strict=True)):
        likely = [int(dist.ids[place]) for place in top_by_score(dist, sampling, position, RANKS)]
        found.append(likely.index(token) if token in likely else RANKS)
    return found


def rates_of(ranks: Sequence[Sequence[int]]) -> list[float]:
    """Share of the targets that have each rank."""
    every = [rank for answer in ranks for rank in answer]
    return [every.count(rank) / len(every) for rank in range(RANKS)]


def likeliest(rates: Sequence[float], rows: int, ahead: int) -> Set[tuple[int, ...]]:
    """Paths of ranks below the last target: so many of the likeliest, none longer than `ahead`."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-rate, (rank,)) for rank, rate in enumerate(rates)]
    found: set[tuple[int, ...]] = set()
    heapq.heapify(waiting)
    while waiting and len(found) < rows:
        weight, path = heapq.heappop(waiting)
        found.add(path)
        for rank, rate in enumerate(rates if len(path) < ahead else ()):
            heapq.heappush(waiting, (weight * rate, (*path, rank)))
    return found


def round_trips(drafts: Mapping[Side, Set[tuple[int, ...]]], ranks: Mapping[Side, Sequence[int]]) -> float:
    """Stretches of an answer: each has the targets below which both sides have drafted, and one more."""
    at = count = 0
    length = len(ranks["cloud"])
    while at < length:
        depth = 0
        while all(tuple(ranks[side][at : at + depth + 1]) in drafts[side] for side in SIDES) and at + depth < length:
            depth += 1
        at += depth + 1
        count += 1
    return float(count)


def session(load: Load, found: Findings) -> None:
    """Bytes an output token, both directions: the worst pace, round trip and level."""
    aims: Mapping[AggregatorName, float] = {"mixture": 256.0, "coin": 32.0}
    for aggregator, aim in aims.items():
        counted = session_bytes.rows(load.sizes, load.tokens, (NEAR, FAR), aggregator)
        found.rows += [row for row, _ in counted]
        sizes = worst_of((each for _, each in counted), "lower")
        found.claim(claimed(f"aggregate.session_bytes_{aggregator}", sizes, aim, "lower"))
