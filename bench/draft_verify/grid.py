"""`draft_verify` against cloud decoding and static drafts by round trip and speed, on a link without limit of rate.

The served machines in virtual time, on the fake model: both engines differ by their spread only, and entropy tells
little of what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.offloading import EnergyQueue, OffloadStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.verify_messages import VerifyOptions

from ..findings import Findings
from ..report import Claim

VOCAB: Final = 257
PROMPT: Final = tuple(b"user: write a long story about a harbour.\nassistant: ")
COMPUTE_W: Final = 12.0  # of the device (Table I)
BUDGET_J: Final = 1.2  # a step (Table I)


def _static(drafts: int, *, second_guesses: bool = False) -> VerifyOptions:
    return VerifyOptions(
        rescoring=False, waits=True, overlap=False, fixed=True, most=drafts, second_guesses=second_guesses
    )


OURS: Final = "ours"
PLAIN: Final = "cloud decoding"
STATIC: Final = ("static 5", "static 7", "static 9")  # as published
STATIC_TWICE: Final = "static 7 with second guesses"
WAYS: Final[Mapping[str, VerifyOptions]] = {
    PLAIN: VerifyOptions(rescoring=False, most=0),
    OURS: VerifyOptions(rescoring=False),
    # With the budget.
    "GELATO": VerifyOptions(rescoring=False, waits=True, overlap=False, least=1, second_guesses=False),
    **{name: _static(int(name.split()[1])) for name in STATIC},
    STATIC_TWICE: _static(7, second_guesses=True),
}


@dataclass(frozen=True, slots=True)
class Load:
    round_trips: Sequence[float] = (0.005, 0.05, 0.2)  # s
    verify: Sequence[float] = (0.03, 0.06, 0.1, 0.14)  # s, a forward of the cloud
    draft: float = 0.0154  # s, a forward of the device
    spreads: Sequence[float] = field(default=(0.1, 0.3, 0.6))  # of the device's engine; the cloud's is 0.3
    tokens: int = 160
    answers: int = 4  # at temperature 1, one after another, with what was learnt before


QUICK = Load(round_trips=(0.05,), verify=(0.03, 0.1), spreads=(0.6,), tokens=48, answers=2)


def measure(load: Load) -> Findings:
    rows: list[dict[str, object]] = []
    against_static, against_twice, against_plain = [], [], []
    for spread in load.spreads:
        for rtt in load.round_trips:
            for verify in load.verify:
                taken = {}
                for name, how in WAYS.items():
                    row = _measure(load, name, how, spread, rtt, verify)
                    taken[name] = float(str(row["ms_per_token"]))
                    rows.append(row)
                against_static.append((rtt, taken["static 7"] / taken[OURS]))
                against_twice.append((rtt, taken[STATIC_TWICE] / taken[OURS]))
                against_plain.append(taken[PLAIN] / taken[OURS])
    longest = max(load.round_trips)
    at_worst = [ratio for rtt, ratio in against_static if rtt == longest]
    twice_at_worst = [ratio for rtt, ratio in against_twice if rtt == longest]
    claims = [
        Claim("draft_verify.virtual_worst_link_vs_static7", min(at_worst), 1.5, "higher"),
        Claim("draft_verify.virtual_worst_link_vs_static7_with_second_guesses", min(twice_at_worst), 1.5, "higher"),
        Claim("draft_verify.virtual_vs_cloud_decoding", min(against_plain), 0.97, "higher"),
    ]
    return Findings(rows, claims)


def _measure(load: Load, name: str, how: VerifyOptions, spread: float, rtt: float, verify: float) -> dict[str, object]:
    queue = EnergyQueue(BUDGET_J) if name == "GELATO" else None
    stats = OnlineStats(offload=OffloadStats(queue=queue, compute_w=COMPUTE_W))
    engines: dict[str, Engine] = {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=spread)}
    seconds = forwards = verifications = drafted = accepted = 0.0
    for seed in range(load.answers):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        config = a_config("device", True, sampling, load.tokens, frozenset(), VOCAB, how, stats=stats)
        branches = {side: (Branch(PROMPT, None),) for side in engines}
        request = SimulatedRequest(STRATEGIES["draft_verify"], "device", changed(config, needs_dists=False), branches)
        world = Simulation(
            request,
            engines,
            network=Network((rtt / 2, rtt / 2)),
            forward={"cloud": verify, "device": load.draft},
            seed=seed,
        )
        world.run()
        seconds += world.now
        device, cloud = world.session("device").finished, world.session("cloud").finished
        assert device is not None and cloud is not None
        forwards, verifications = forwards + device.stats["forwards"], verifications + cloud.stats["forwards"]
        drafted, accepted = drafted + device.stats["drafted"], accepted + device.stats["accepted"]
    tokens = load.answers * load.tokens
    return {
        "part": "round trips",
        "way": name,
        "spread": spread,
        "rtt_ms": 1e3 * rtt,
        "verify_ms": 1e3 * verify,
        "ms_per_token": 1e3 * seconds / tokens,
        "joules_per_token": COMPUTE_W * load.draft * forwards / tokens,
        "cloud_forwards_per_token": verifications / tokens,
        "acceptance": accepted / drafted if drafted else None,
    }
