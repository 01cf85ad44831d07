"""The place of the decision while conditions change in mid-answer: the served machines in virtual time.

Three ways write the same answers: the decision moves as it is served, or stays on the device or on the cloud from the
first target on. Both fixed sides learn speeds and acceptance as the served way does, and the better of them is picked
by its mean after the run. Half of the tokens are written under the first conditions, half under the second. Texts must
be equal. Clients ask at the device; the link is in order, of constant delay and without limit of rate.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from lab.simulation.host import StepCost
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, DraftLimits

from ..bootstrap import Estimate, ratio_of
from ..findings import Findings
from ..report import Claim
from .session_bytes import BRANCHES, ROW_S
from .turning_engine import TurningEngine

VOCAB: Final = 257
CHAIN: Final = DraftLimits(width=1, rows=1, ahead=10)


@dataclass(frozen=True, slots=True)
class Drafting:
    options: AggregateOptions
    private: bool = False  # document-private, else open


DRAFTING: Final[Mapping[str, Drafting]] = {
    "trees": Drafting(AggregateOptions(aggregator="mixture")),
    "trees, coin, document-private": Drafting(AggregateOptions(aggregator="coin", rescoring=False), private=True),
    "chains": Drafting(AggregateOptions(aggregator="mixture", drafting=CHAIN)),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Speeds, round trip and spread during one half of an answer.

    cloud, device: s of a forward of one row. spread: of the engines, see `FakeEngine`.
    """

    cloud: float
    device: float
    rtt: float
    cloud_spread: float = 0.6
    device_spread: float = 0.6

    @property
    def forward(self) -> Mapping[str, StepCost]:
        return {"cloud": StepCost(self.cloud, ROW_S), "device": StepCost(self.device, ROW_S)}

    @property
    def network(self) -> Network:
        return Network((self.rtt / 2, self.rtt / 2))


CONSTANT: Final[Mapping[str, tuple[Conditions, Conditions]]] = {
    name: (conditions, conditions)
    for name, conditions in {
        "equal, 50 ms": Conditions(0.03, 0.03, 0.05),
        "equal, 300 ms": Conditions(0.03, 0.03, 0.3),
        "device 10x slower, 50 ms": Conditions(0.006, 0.06, 0.05),
        "device 10x slower, 300 ms": Conditions(0.006, 0.06, 0.3),
        "cloud 10x slower, 50 ms": Conditions(0.06, 0.006, 0.05),
        "cloud 10x slower, 300 ms": Conditions(0.06, 0.006, 0.3),
    }.items()
}
CHANGING: Final[Mapping[str, tuple[Conditions, Conditions]]] = {
    "the device throttles": (Conditions(0.06, 0.015, 0.1), Conditions(0.06, 0.24, 0.1)),
    "the cloud fills up": (Conditions(0.006, 0.1, 0.1), Conditions(0.12, 0.02, 0.1)),
    "the link degrades": (Conditions(0.03, 0.09, 0.05), Conditions(0.03, 0.09, 0.4)),
    "the text turns from the device's document to the cloud's": (
        Conditions(0.03, 0.03, 0.2, cloud_spread=0.9, device_spread=0.3),
        Conditions(0.03, 0.03, 0.2, cloud_spread=0.3, device_spread=0.9),
    ),
}
WAYS: Final[Mapping[str, Side | None]] = {"live": None, "stays on device": "device", "stays on cloud": "cloud"}


@dataclass(frozen=True, slots=True)
class Load:
    answers: int = 8  # one after another, after one that is not measured
    tokens: int = 80


QUICK: Final = Load(answers=2, tokens=48)


@dataclass(slots=True)
class Taken:
    s_per_token: list[float]  # of each answer, after its first token
    texts: list[tuple[int, ...]]
    handovers: float = 0.0  # an answer


def measure(load: Load, drafting: Sequence[str] = tuple(DRAFTING)) -> Findings:
    """Claims for each drafting: the worst median ratio to the better side, with its interval, and the geometric mean
    of the gains where conditions change."""
    found = Findings()
    for how in drafting:
        constant = [_compared(found, load, how, name, halves) for name, halves in CONSTANT.items()]
        changing = [_compared(found, load, how, name, halves) for name, halves in CHANGING.items()]
        worst = max((*constant, *changing), key=lambda ratio: ratio.value)
        gained = statistics.geometric_mean(1.0 / ratio.value for ratio in changing)
        name = how.replace(", ", "_").replace("-", "_")
        found.claim(Claim(f"aggregate.placement_worst_{name}", worst.value, 1.02, "lower"), worst)
        found.claim(Claim(f"aggregate.placement_change_{name}", gained, 1.1, "higher"))
    return found


def _compared(found: Findings, load: Load, how: str, name: str, halves: tuple[Conditions, Conditions]) -> Estimate:
    """Time of the served way over that of the better fixed side, answer by answer."""
    taken = {way: play(DRAFTING[how], side, halves, load) for way, side in WAYS.items()}
    if any(each.texts != taken["live"].texts for each in taken.values()):
        raise AssertionError("the place of the decision has changed a token")
    fixed = min((way for way, side in WAYS.items() if side), key=lambda way: statistics.fmean(taken[way].s_per_token))
    ratio = ratio_of(taken["live"].s_per_token, taken[fixed].s_per_token)
    found.rows += [
        {
            "part": "placement",
            "drafts": how,
            "conditions": name,
            "way": way,
            "s_per_token": statistics.fmean(each.s_per_token),
            "handovers": each.handovers,
            **({"vs_better_side": ratio.value, "interval": ratio.interval} if way == "live" else {}),
        }
        for way, each in taken.items()
    ]
    return ratio


def play(drafting: Drafting, side: Side | None, halves: tuple[Conditions, Conditions], load: Load) -> Taken:
    """Write the answers. side: where the decision stays; None: it moves."""
    taken = Taken([], [])
    stats = {side: OnlineStats() for side in SIDES}
    for seed in range(load.answers + 1):
        world = _world(drafting, side, halves, load, seed, stats)
        began = _play(world, halves, load.tokens)
        taken.texts.append(tuple(world.front.tokens))
        if seed:
            taken.s_per_token.append((world.now - began) / (load.tokens - 1))
            for name in SIDES:
                finish = world.session(name).finished
                assert finish is not None
                taken.handovers += finish.stats["handovers"] / load.answers
    return taken


def _world(
    drafting: Drafting,
    side: Side | None,
    halves: tuple[Conditions, Conditions],
    load: Load,
    seed: int,
    stats: Mapping[Side, OnlineStats],
) -> Simulation:
    strategy = STRATEGIES["aggregate"]
    if side is not None:
        strategy = replace(strategy, machine=functools.partial(Aggregate, keep_at=side))
    config = a_config(
        "device",
        True,
        SamplingParams(seed=seed),
        load.tokens,
        frozenset(),
        VOCAB,
        drafting.options,
        private=drafting.private,
        needs_dists=False,
    )
    request = SimulatedRequest(strategy, "device", config, BRANCHES)
    first, second = halves
    engines = {
        "cloud": TurningEngine(first.cloud_spread, second.cloud_spread, load.tokens // 2),
        "device": TurningEngine(first.device_spread, second.device_spread, load.tokens // 2),
    }
    world = Simulation(request, engines, seed=seed, network=first.network, forward=first.forward)
    for name in SIDES:  # each keeps what it has measured
        session = world.session(name)
        session.request = replace(request, config=changed(config, stats=stats[name]))
    return world


def _play(world: Simulation, halves: tuple[Conditions, Conditions], tokens: int) -> float:
    """Run it, and change its conditions in the middle. Returns the time of the first token."""
    first, second = halves
    began: list[float] = []

    def look(world: Simulation) -> None:
        if not began and world.front.tokens:
            began.append(world.now)
        if first != second and len(world.front.tokens) >= tokens // 2:
            for name, cost in second.forward.items():
                world.hosts[name].forward = cost
            for link in world.links.values():
                link.network = second.network

    world.run(look, checks=False)
    return began[0]
