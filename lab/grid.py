"""`python -m lab.grid`: what `auto` takes, beside every other way to the same text.

The served machines in virtual time on the fake model. A situation says who may write (what was found, and whose model
is larger), how fast the sides and their link are, and what else the cloud has to do. Routing chooses from those facts,
and among several ways alone by what earlier answers took. What it learns only from the peer costs a round trip, in
which this side writes ahead, as `runtime.sessions.client` does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation, StageTimes
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.engine.base import Engine
from paceline.engine.fake import EOS, VOCAB, FakeEngine
from paceline.runtime.sessions.routing import ALONE, JOINT, STAGED, VERIFIED, Costs, candidates, choose
from paceline.strategies.base import Branch, Cancelled, RoutingContext, SideFacts, Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, Options
from paceline.wire.verify_messages import VerifyOptions

ASKED: Final = b"user: write a long story about a harbour.\nassistant: "
PASSAGE: Final = b"The harbour library opens at eight. "
SCORE: Final = 4.0  # of a passage that was found
SMALL, LARGE = 1_000, 2_000  # weights of the two models
MIXTURE: Final = ("coin", "mixture")


@dataclass(frozen=True, slots=True)
class Situation:
    name: str
    device: float = 0.03  # s, a forward of the device
    cloud: float = 0.03  # s, a forward of the cloud
    rtt: float = 0.05  # s
    spread: float = 0.1  # of the engines' distributions: how hard a text is to draft
    found: Sequence[Side] = ()
    larger: Side = "cloud"  # the side of the larger model
    temperature: float = 1.0
    stages: int = 1  # of the device's model
    draft: float | None = None  # s, a forward of the device's draft model; None: there is none
    others: int = 0  # answers that the cloud writes meanwhile for others
    at_once: int = 1  # answers of this kind
    row: float = 0.0  # share of a forward that each further row costs
    tokens: int = 96
    answers: int = 9  # one after another, with what was learnt before
    warm: int = 6  # of them, before the measured ones

    @property
    def text(self) -> str:
        """Side whose text it is; "both" for the mixture."""
        if len(self.found) == 1:
            return self.found[0]
        return "both" if self.found else self.larger


def _served(device: float, cloud: float, rtt: float, spread: float) -> Situation:
    name = f"nothing private: verify {1e3 * cloud:g}, draft {1e3 * device:g}, RTT {1e3 * rtt:g}, spread {spread:g}"
    return Situation(name, device, cloud, rtt, spread)


SITUATIONS: Final = (
    *(
        _served(device, 0.03, rtt, spread)
        for spread in (0.1, 0.3)
        for device in (0.06, 0.03)
        for rtt in (0.005, 0.05, 0.2)
    ),
    _served(0.015, 0.1, 0.005, 0.1),
    _served(0.015, 0.1, 0.05, 0.1),
    _served(0.015, 0.1, 0.2, 0.3),
    *(
        Situation(
            f"{stages} stages, a draft model, spread {spread:g}",
            0.1,
            spread=spread,
            stages=stages,
            draft=0.01,
            larger="device",
        )
        for stages in (2, 4)
        for spread in (0.1, 0.3)
    ),
    Situation("2 stages, no draft model", 0.1, stages=2, larger="device"),
    Situation("4 stages, no draft model", 0.1, stages=4, larger="device", spread=0.3),
    *(
        Situation(f"{said}, RTT 300, {1e3 * device:g}/{1e3 * cloud:g}", device, cloud, 0.3, found=found, larger=larger)
        for said, found, larger in cast(
            "Sequence[tuple[str, Sequence[Side], Side]]",
            (
                ("found on the device alone", ("device",), "cloud"),
                ("found on the cloud alone", ("cloud",), "device"),
                ("found nowhere, larger cloud", (), "cloud"),
                ("found nowhere, no larger cloud", (), "device"),
            ),
        )
        for device, cloud in ((0.03, 0.03), (0.06, 0.006))
    ),
    Situation("found on both", found=SIDES),
    Situation("a busy cloud", 0.03, 0.1, others=8, row=0.02),
    Situation("a throttled device", 0.3, 0.03),
    Situation("16 answers at once", 0.03, 0.1, at_once=16, row=0.02, answers=3, warm=1),
    Situation("temperature 0, tables warm", temperature=0.0, larger="device"),
)
QUICK: Final = tuple(
    replace(each, answers=8)
    for each in SITUATIONS
    if each.name
    in (
        "nothing private: verify 30, draft 60, RTT 50, spread 0.1",
        "nothing private: verify 100, draft 15, RTT 50, spread 0.1",
        "2 stages, a draft model, spread 0.1",
        "found on the device alone, RTT 300, 30/30",
        "found on the cloud alone, RTT 300, 60/6",
        "found nowhere, no larger cloud, RTT 300, 30/30",
    )
)


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy, at the side that it runs from, and what happens before it begins."""

    strategy: str
    options: Options | None = None
    host: Side = "device"
    before: float = 0.0  # s, until it begins and its first text is here, beside its own messages
    after: Way | None = None  # written ahead beside this one's first round trip, and taken then

    @property
    def name(self) -> str:
        return self.strategy + (f" at the {self.host}, streamed" if self.host == "cloud" else "")


def ways(situation: Situation) -> list[Way]:
    """Every way to the situation's text but the one that `auto` takes."""
    joint = Way(JOINT, AggregateOptions(aggregator="coin", writer=situation.larger))
    alone = [Way(name) for name in ((ALONE, "autoregressive") if situation.stages == 1 else (ALONE, STAGED))]
    streamed = [replace(each, host="cloud", before=situation.rtt) for each in alone]
    if situation.text == "both":
        return [replace(joint, options=AggregateOptions(aggregator=name)) for name in MIXTURE]
    joins = [] if situation.stages > 1 else [joint]
    if situation.text == "device":
        return [*alone, *joins]
    return [Way(VERIFIED, VerifyOptions(rescoring=False)), *streamed, *joins]


@dataclass
class Learnt:
    """State that each side keeps from answer to answer: statistics of each strategy, and one owner's look-up table."""

    stats: defaultdict[tuple[str, Side], OnlineStats] = field(default_factory=lambda: defaultdict(OnlineStats))
    tables: Mapping[Side, LookupTable] = field(default_factory=lambda: {side: LookupTable(VOCAB) for side in SIDES})


def taken_by_auto(situation: Situation, alone: Costs, of_cloud: Costs) -> Way:
    """The way that routing chooses at the device."""
    weights = {side: LARGE if side == situation.larger else SMALL for side in SIDES}
    context = RoutingContext(
        "device",
        Wish(seeded=False),
        SideFacts(1, weights["device"], costs=alone.among(situation.at_once)),
        SideFacts(1, weights["cloud"], costs=of_cloud.among(situation.at_once)),
        expected=True,
        linked=situation.stages == 1,  # a model in stages is asked for by itself here
        common=tuple(STRATEGIES),
    )
    choice = choose(candidates(context), replace(context, passages=int("device" in situation.found)))
    joint = STRATEGIES[choice.strategy].needs_peer
    after = Way(ALONE) if joint and situation.text == "device" else None  # the cloud finds nothing, and says so
    return Way(choice.strategy, choice.options, after=after)


def measure(situation: Situation, choose_way: Callable[[], Way], costs: Sequence[Costs] = ()) -> float:
    """Mean seconds a token, the first token's wait included. costs: told what each answer took."""
    learnt = Learnt()
    engines: dict[str, Engine] = {side: FakeEngine(seed=1, spread=situation.spread) for side in SIDES}
    seconds = []
    for number in range(situation.answers):
        way = choose_way()
        seconds.append(_answer(situation, way, learnt, engines, number) / situation.tokens)
        for each in costs if way.after is None else ():
            each.add(way.strategy, situation.at_once, seconds[-1])
    return statistics.fmean(seconds[situation.warm :])


def _answer(
    situation: Situation,
    way: Way,
    learnt: Learnt,
    engines: Mapping[str, Engine],
    number: int,
) -> float:
    """Seconds of an answer; of several at once those of the last."""
    speeds = {"device": situation.device, "cloud": situation.cloud}
    count, rtt, draft, after = situation.at_once, situation.rtt, situation.draft, way.after
    requests = [_request(situation, way, learnt, 100 * number + i) for i in range(count)]
    if after is not None:  # from the KV of the prompts, once that is there
        begins = situation.device
        requests += [replace(_request(situation, after, learnt, 100 * number + i), start=begins) for i in range(count)]
    busy = Way("autoregressive", host="cloud")
    requests += [_request(situation, busy, Learnt(), 9_000 + i) for i in range(situation.others)]
    world = Simulation(
        requests,
        engines,
        seed=number,
        network=Network((rtt / 2, rtt / 2)),
        forward={side: _rows(seconds, situation.row) for side, seconds in speeds.items()},
        stages={"device": _stages(situation)} if situation.stages > 1 else None,
        drafts=None if draft is None else {"device": (FakeEngine(seed=1, spread=situation.spread), draft)},
    )
    for index in range(count if STRATEGIES[way.strategy].needs_peer else 0):
        session = world.session("cloud", index)
        own = changed(session.request.config, stats=learnt.stats[way.strategy, "cloud"], table=learnt.tables["cloud"])
        session.request = replace(session.request, config=own)
    ended: list[float] = []

    def watch(world: Simulation) -> None:
        if after is not None and world.now >= rtt:
            for answer in world.answers[:count]:
                answer.deliver(Cancelled())
        written = world.answers[:count] if after is None else world.answers[count : 2 * count]
        if not ended and all(answer.finished for answer in written):
            ended.append(world.now)

    world.run(watch, checks=False)
    watch(world)
    return max(ended[0], rtt if after is not None else 0.0) + way.before


def _request(situation: Situation, way: Way, learnt: Learnt, seed: int) -> SimulatedRequest:
    sampling = SamplingParams(situation.temperature, seed=seed, logit_bias={EOS: -100.0})
    options = way.options or Options(rescoring=False)
    config = a_config(way.host, True, sampling, situation.tokens, frozenset({EOS}), VOCAB, options)
    config = changed(
        config, needs_dists=False, stats=learnt.stats[way.strategy, way.host], table=learnt.tables[way.host]
    )
    prompts = {
        side: (Branch(tuple(PASSAGE + ASKED), SCORE) if side in situation.found else Branch(tuple(ASKED), None),)
        for side in SIDES
    }
    return SimulatedRequest(STRATEGIES[way.strategy], way.host, config, {str(side): prompts[side] for side in SIDES})


def _rows(seconds: float, share: float) -> Callable[[int], float]:
    return lambda rows: seconds * (1.0 + share * (rows - 1))


def _stages(situation: Situation) -> StageTimes:
    each = situation.device / situation.stages
    return StageTimes(situation.stages, lambda rows: each * (1.0 + situation.row * (rows - 1)), 0.001)


@dataclass(frozen=True, slots=True)
class Cell:
    situation: str
    text: str
    took: str  # by `auto`, in the last answer
    auto: float  # s a token
    best: str
    others: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return self.auto / min(self.others[self.best], self.auto)


def cell(situation: Situation) -> Cell:
    others: dict[str, float] = {}
    for way in ways(situation):
        name = way.name if not isinstance(way.options, AggregateOptions) else f"{way.name} ({way.options.aggregator})"
        others[name] = measure(situation, lambda way=way: way)  # type: ignore[misc]
    alone = Costs({ALONE: 1.0} if situation.stages == 1 else {ALONE: 1.0, STAGED: 0.9 if situation.draft else 1.0})
    of_cloud = Costs({VERIFIED: 1.0, JOINT: 1.2})
    auto = measure(situation, lambda: taken_by_auto(situation, alone, of_cloud), (alone, of_cloud))
    took = taken_by_auto(situation, alone, of_cloud).name
    return Cell(situation.name, situation.text, took, auto, min(others, key=lambda name: others[name]), others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few situations, short answers")
    parser.add_argument("--only", default="", help="situations whose names hold this")
    asked = parser.parse_args()
    sys.stdout.write(
        "| situation | text | auto takes | ms a token | others | auto / best |\n|---|---|---|--:|---|--:|\n"
    )
    for situation in QUICK if asked.quick else SITUATIONS:
        if asked.only not in situation.name:
            continue
        found = cell(situation)
        others = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in found.others.items())
        row = (found.situation, found.text, found.took, f"{1e3 * found.auto:.1f}", others, f"{found.ratio:.2f}")
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
