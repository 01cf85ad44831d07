"""`draft_verify` against both ways that it is made of: drafts of the device alone, and the cloud's own tables.

The served machines in virtual time, on the fake model; cold tables in each answer, as a device's answers find them at
its cloud. Steps take the same time whatever their rows, or 5 % more for each row, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from lab.configs import a_config, changed
from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.offloading import OffloadStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch, Machine, MachineConfig
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DEFAULT_OPTIONS
from paceline.wire.verify_messages import VerifyOptions

from ..findings import Findings
from ..report import Claim
from .grid import COMPUTE_W, PROMPT, VOCAB

MERGED: Final = "draft_verify"
DEVICE_ALONE: Final = "drafts of the device alone"
CLOUD_TABLES: Final = "lookup_tree in the cloud, streamed"


@dataclass(frozen=True, slots=True)
class Pace:
    verify: float  # s, a forward of the cloud
    draft: float  # s, of the device
    rtt: float  # s
    row: float = 0.0  # of a forward's time, that each further row adds
    spread: float = 0.1  # of the device's engine; the cloud's is 0.3

    def seconds(self, rows: int) -> float:
        return self.verify * (1.0 + self.row * (rows - 1))


BOTH_DRAFT: Final = Pace(0.1, 0.015, 0.05)
PACES: Final = (
    BOTH_DRAFT,
    *(Pace(0.1, 0.015, rtt) for rtt in (0.005, 0.2)),
    Pace(0.1, 0.015, 0.05, spread=0.6),
    Pace(0.06, 0.03, 0.05),
    *(Pace(0.03, 0.06, rtt) for rtt in (0.005, 0.05, 0.2)),
)


@dataclass(frozen=True, slots=True)
class Load:
    paces: Sequence[Pace] = (*PACES, *(replace(pace, row=0.05) for pace in PACES))
    tokens: int = 160
    answers: int = 4  # at temperature 1, one after another; what was measured is kept, tables are not


QUICK = Load(paces=(BOTH_DRAFT, Pace(0.03, 0.06, 0.2)), tokens=96, answers=2)


def measure(load: Load) -> Findings:
    """Raises AssertionError where two ways write different texts."""
    rows: list[dict[str, object]] = []
    against_better: dict[Pace, float] = {}
    for pace in load.paces:
        played = {
            MERGED: _play(load, pace, "draft_verify", "device"),
            DEVICE_ALONE: _play(load, pace, "draft_verify", "device", cloud_drafts=False),
            CLOUD_TABLES: _play(load, pace, "lookup_tree", "cloud"),
        }
        texts = [text for _, text in played.values()]
        assert all(text == texts[0] for text in texts), "the text depends on what is drafted"
        taken = {way: ms for way, (ms, _) in played.items()}
        against_better[pace] = min(taken[DEVICE_ALONE], taken[CLOUD_TABLES]) / taken[MERGED]
        conditions = {
            "part": "parents",
            "verify_ms": 1e3 * pace.verify,
            "draft_ms": 1e3 * pace.draft,
            "rtt_ms": 1e3 * pace.rtt,
            "row_cost": pace.row,
            "spread": pace.spread,
        }
        rows += [{**conditions, "way": way, "ms_per_token": ms} for way, ms in taken.items()]
    claims = [
        Claim("draft_verify.where_both_draft", against_better[BOTH_DRAFT], 1.15, "higher"),
        Claim("draft_verify.vs_better_parent", min(against_better.values()), 0.97, "higher"),
    ]
    return Findings(rows, claims)


def _play(
    load: Load, pace: Pace, strategy: str, front: Side, *, cloud_drafts: bool = True
) -> tuple[float, list[list[int]]]:
    """ms a token at the device, and the texts."""
    stats = {side: OnlineStats(offload=OffloadStats(compute_w=COMPUTE_W)) for side in SIDES}
    engines = {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=pace.spread)}
    record = STRATEGIES[strategy]

    def machine(config: MachineConfig) -> Machine:
        side = config.seat.side
        table = LookupTable(VOCAB) if side == "device" or cloud_drafts else None
        return record.machine(changed(config, stats=stats[side], table=table))

    seconds, texts = 0.0, []
    for seed in range(load.answers):
        options = VerifyOptions(rescoring=False) if strategy == "draft_verify" else DEFAULT_OPTIONS
        sampling = SamplingParams(temperature=1.0, seed=seed)
        config = a_config(front, True, sampling, load.tokens, frozenset(), VOCAB, options, needs_dists=False)
        branches = {side: (Branch(PROMPT, None),) for side in engines}
        world = Simulation(
            SimulatedRequest(replace(record, machine=machine), front, config, branches),
            engines,
            network=Network((pace.rtt / 2, pace.rtt / 2)),
            forward={"cloud": pace.seconds, "device": pace.draft},
            seed=seed,
        )
        texts.append(world.run(checks=False).tokens)
        # A cloud in front is asked over the link, and streams. With the device in front the last event is the cloud's,
        # which hears that the answer has ended half a round trip later.
        seconds += world.now + (pace.rtt if front == "cloud" else -pace.rtt / 2)
    return 1e3 * seconds / (load.tokens * load.answers), texts
