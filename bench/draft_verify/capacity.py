"""How many answers a saturated cloud writes at an equal pace: drafts from devices, from the cloud itself, or none.

All answers run on one emulated accelerator, whose step takes the time of reading the weights once, of computing its
rows, and of reading the KV of its sequences. Co-located drafting computes the draft model's steps on the same
accelerator; drafting on devices does not (arXiv 2606.25091: 1 + γ t_d / t_v as many answers for γ drafts). Each device
has its own engine and the same link. The machines, driver and batching are those that serve; clock virtual.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from lab.configs import a_config
from lab.simulation import Accelerator, Network, SimulatedRequest, Simulation, StepCost
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DEFAULT_OPTIONS, Options
from paceline.wire.verify_messages import VerifyOptions

from ..findings import Findings
from ..report import Claim
from .answers import DRAFT_S, PROMPT
from .paired_engines import VOCAB, PairedEngine
from .ways import waiting

MEMORY: Final = 335e9  # bytes/s
COMPUTE: Final = 40e12  # operations/s
CONTEXT: Final = 2048  # rows of an answer's KV


@dataclass(frozen=True, slots=True)
class Model:
    """A model in bfloat16 on an accelerator of a tenth of an H100's speed: the costs of its steps."""

    weights: float
    kv_bytes: float  # of a row

    @property
    def cost(self) -> StepCost:
        return StepCost(2.0 * self.weights / MEMORY, 2.0 * self.weights / COMPUTE, CONTEXT * self.kv_bytes / MEMORY)


SEVEN_B: Final = Model(7.6e9, 57_344)  # Qwen2.5's shapes
ONE_AND_A_HALF_B: Final = Model(1.54e9, 28_672)
HALF_B: Final = Model(0.494e9, 12_288)


@dataclass(frozen=True, slots=True)
class Regime:
    name: str
    target: Model
    pace: float  # tokens/s of each answer, at least


REGIMES: Final = (Regime("0.5B for 7B", SEVEN_B, 10.0), Regime("0.5B for 1.5B", ONE_AND_A_HALF_B, 20.0))
PLAIN: Final = "plain decoding"


@dataclass(frozen=True, slots=True)
class Load:
    regimes: Sequence[Regime] = REGIMES
    drafts: Sequence[int] = (3,)
    rtt: float = 0.04  # s
    tokens: int = 40
    trials: int = 3


QUICK: Final = Load((Regime("0.5B for 7B", SEVEN_B, 20.0),), (2,), 0.04, 16, 2)


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    options: Options
    drafts: int = 0
    in_cloud: bool = False


def _ways(load: Load) -> list[Way]:
    found = [Way(PLAIN, DEFAULT_OPTIONS)]
    for drafts in load.drafts:
        found.append(Way(f"devices, cloud waits, {drafts}", waiting(drafts), drafts))
        found.append(Way(f"devices, cloud waits, {drafts} and ahead", waiting(drafts, overlap=True), drafts))
        found.append(Way(f"co-located, {drafts}", waiting(drafts), drafts, in_cloud=True))
    return [*found, Way("devices, the default", VerifyOptions(rescoring=False), 4)]


@dataclass(slots=True)
class Run:
    pace: float  # tokens/s of the median answer
    engine_ms_per_token: float


def serve(regime: Regime, way: Way, answers: int, load: Load) -> Run:
    """So many answers at once, which begin within a second."""
    strategy = STRATEGIES["autoregressive" if way.name == PLAIN else "draft_verify"]
    front = "device" if way.drafts and not way.in_cloud else "cloud"
    requests, engines, forward = [], {"cloud": PairedEngine(target=True)}, {"cloud": regime.target.cost}
    accelerator = Accelerator(last="cloud" if way.in_cloud else "")  # drafts first, so that answers stay in step
    shared = {"cloud": accelerator}
    if way.in_cloud:
        engines["device"], forward["device"] = PairedEngine(target=False), HALF_B.cost
        shared["device"] = accelerator
    steps: dict[str, StepCost | float] = dict(forward)
    for number in range(answers):
        host = "device" if way.in_cloud or not way.drafts else f"device {number}"
        if host not in engines and way.drafts:
            engines[host], steps[host] = PairedEngine(target=False), DRAFT_S
        config = a_config(
            front,  # type: ignore[arg-type]  # a side
            True,
            SamplingParams(temperature=1.0, seed=number),
            load.tokens,
            frozenset(),
            VOCAB,
            way.options,
            stats=OnlineStats(),
            needs_dists=False,
        )
        branches = {name: (Branch((*PROMPT, number), None),) for name in ("cloud", host)}
        facing = host if front == "device" else "cloud"
        requests.append(
            SimulatedRequest(
                strategy,
                facing,
                config,
                branches,
                sides={host: "device", "cloud": "cloud"},
                peers={host: "cloud", "cloud": host} if way.drafts else {},
                start=(number + 1) / answers,
            )
        )
    delay = 0.0 if way.in_cloud else load.rtt / 2
    world = Simulation(requests, engines, network=Network((delay, delay)), forward=steps, accelerators=shared)
    ends: dict[int, float] = {}

    def watch(simulation: Simulation) -> None:
        for index, answer in enumerate(simulation.answers):
            if index not in ends and answer.finished is not None:
                ends[index] = simulation.now

    world.run(before=watch, checks=False)
    watch(world)
    seconds = [ends[index] - request.start for index, request in enumerate(requests)]
    tokens = answers * load.tokens
    return Run(load.tokens / statistics.median(seconds), 1e3 * accelerator.busy_s / tokens)


def capacity(run: Callable[[int], Run], pace: float, first: int, trials: int) -> tuple[float, Run]:
    """Most answers at that pace, between the tried numbers by the line through the last two, and the last run."""
    tried: list[tuple[int, Run]] = []
    number = first
    for _ in range(trials):
        found = run(number)
        tried.append((number, found))
        number = max(1, round(number * found.pace / pace))
        if any(number == known for known, _ in tried):
            break
    slower = [(count, each) for count, each in tried if each.pace < pace]
    faster = [(count, each) for count, each in tried if each.pace >= pace]
    if not slower or not faster:
        count, last = tried[-1]
        return count * last.pace / pace, last
    low, below = max(faster, key=lambda each: each[0])
    high, above = min(slower, key=lambda each: each[0])
    share = (1.0 / pace - 1.0 / below.pace) / (1.0 / above.pace - 1.0 / below.pace)
    return low + share * (high - low), below


def measure(load: Load) -> Findings:
    findings = Findings()
    for regime in load.regimes:
        rows: dict[str, dict[str, object]] = {}
        most: dict[str, float] = {}
        first = max(1, round((1.0 / regime.pace - regime.target.cost.base_s) / _marginal(regime.target, 0)))
        for way in _ways(load):
            most[way.name], last = capacity(partial(_answers, regime, way, load), regime.pace, first, load.trials)
            rows[way.name] = {
                "part": "capacity",
                "regime": regime.name,
                "way": way.name,
                "pace": regime.pace,
                "answers": most[way.name],
                "times_plain": most[way.name] / most[PLAIN],
                "engine_ms_per_token": last.engine_ms_per_token,
                "closed_form_vs_co_located": closed_form(regime.target, way.drafts, most[way.name]),
            }
        findings.rows += rows.values()
        devices = max(value for name, value in most.items() if name.startswith("devices"))
        beside = max(value for name, value in most.items() if name.startswith("co-located"))
        suffix = "" if regime is load.regimes[0] else f"_{regime.name.replace(' ', '_').replace('.', '')}"
        findings.claims.append(Claim(f"draft_verify.capacity_vs_co_located{suffix}", devices / beside, 1.2, "higher"))
        findings.claims.append(Claim(f"draft_verify.capacity_vs_plain{suffix}", devices / most[PLAIN], 1.5, "higher"))
    return findings


def _answers(regime: Regime, way: Way, load: Load, answers: int) -> Run:
    return serve(regime, way, answers, load)


def _marginal(model: Model, drafts: int) -> float:
    """Seconds that one more answer adds to a step with so many drafts of it."""
    return model.cost.sequence_s + (drafts + 1) * model.cost.row_s


def closed_form(target: Model, drafts: int, answers: float) -> float:
    """1 + γ t_d / t_v, with the times of steps of so many answers."""
    verify = target.cost.base_s + answers * _marginal(target, drafts)
    return 1.0 + drafts * (HALF_B.cost.base_s + answers * _marginal(HALF_B, 0)) / verify
