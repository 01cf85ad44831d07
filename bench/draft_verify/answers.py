"""Answers of one way in virtual time: the served machines, codec, driver and link, and what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from lab.configs import a_config
from lab.simulation import Channel, FadingChannel, Network, RadioParameters, SimulatedRequest, Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.offloading import THROUGHPUT_WEIGHT, EnergyQueue, OffloadStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import SessionFrame, Targets
from paceline.wire.payloads import decode_places
from paceline.wire.verify_messages import DraftChain

from .paired_engines import ENTRY_BITS, VOCAB, PairedEngine, Payload, nats_of
from .ways import Way

PROMPT: Final = tuple(range(1000, 1008))
COMPUTE_W: Final = 12.0  # of the device (Table I)
SEND_W: Final = 0.2  # 23 dBm
RECEIVE_W: Final = 0.0794  # 19 dBm, of DSSD's receiver
DRAFT_S: Final = 0.0154  # s, a forward of the device


@dataclass(frozen=True, slots=True)
class Setting:
    """Conditions of answers that are written one after another; what they teach is kept."""

    payload: Payload
    radio_hz: float | None = None  # None: a link without limit of rate
    rtt: float = 0.0  # s
    verify: float = 0.1  # s, a forward of the cloud
    draft: float = DRAFT_S  # s, a forward of the device
    cloud_draft: float = 0.0065  # s, a forward of the draft model in the cloud
    tokens: int = 200
    answers: int = 3


@dataclass(slots=True)
class Taken:
    """Tokens, time and energy of one answer, or their sums over several."""

    tokens: int = 0
    seconds: float = 0.0
    drafting_forwards: float = 0.0
    cloud_forwards: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    joules: float = 0.0  # of the device
    rounds: int = 0  # of drafts that the cloud was to wait for; 0 where it does not wait
    up_s: float = 0.0  # airtime of the uplink
    draft_bytes: int = 0  # of messages with drafts, as the session counts them

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def row(self) -> dict[str, object]:
        return {
            "tokens_per_s": self.tokens_per_s,
            "joules_per_token": self.joules / self.tokens,
            "joules_per_round": self.joules / self.rounds if self.rounds else None,
            "cloud_forwards_per_token": self.cloud_forwards / self.tokens,
            "acceptance": self.accepted / self.drafted if self.drafted else None,
            "uplink_ms_per_token": 1e3 * self.up_s / self.tokens,
            "bytes_per_draft": self.draft_bytes / self.drafted if self.drafted else None,
        }


def total(answers: Sequence[Taken]) -> Taken:
    names = [each.name for each in fields(Taken)]
    return Taken(**{name: sum(getattr(answer, name) for answer in answers) for name in names})


def play(way: Way, setting: Setting, engines: Mapping[str, PairedEngine]) -> list[Taken]:
    """Write the setting's answers, at temperature 1, with noise and fading that are the same for every way."""
    # A served budget weighs throughput by what drafts cost; the paper's, of a step, by its constant.
    weight = None if way.per == "token" else THROUGHPUT_WEIGHT
    queue = None if way.budget is None else EnergyQueue(way.budget, per=way.per, weight=weight)
    stats = OnlineStats(offload=OffloadStats(queue=queue, compute_w=COMPUTE_W, send_w=SEND_W))
    return [_play(way, setting, engines, stats, seed) for seed in range(setting.answers)]


def _play(way: Way, setting: Setting, engines: Mapping[str, PairedEngine], stats: OnlineStats, seed: int) -> Taken:
    strategy = STRATEGIES[way.strategy]
    sampling = SamplingParams(temperature=1.0, seed=seed)
    config = a_config(
        way.front, True, sampling, setting.tokens, frozenset(), VOCAB, way.options, stats=stats, needs_dists=False
    )
    branches: dict[str, tuple[Branch, ...]] = {side: (Branch(PROMPT, None),) for side in SIDES}
    delay = 0.0 if way.in_cloud else setting.rtt / 2
    channels: dict[str, Channel] = {}
    if setting.radio_hz is not None and not way.in_cloud:
        radio = RadioParameters(setting.radio_hz)
        channels = {side: FadingChannel(radio, seed=10 * seed + index) for index, side in enumerate(SIDES)}
    world = Simulation(
        SimulatedRequest(strategy, way.front, config, branches),
        engines,
        seed=seed,
        network=Network((delay, delay), channels=channels),
        forward={"cloud": setting.verify, "device": setting.cloud_draft if way.in_cloud else setting.draft},
        airbytes=lambda message: airbytes(message, way, setting.payload),
    )
    before = {side: engines[side].forwards for side in SIDES}
    world.run()
    forwards = {side: engines[side].forwards - before[side] for side in SIDES}
    taken = Taken(setting.tokens)
    taken.seconds = world.now + (setting.rtt / 2 if way.front == "cloud" else 0.0)  # the text is streamed down
    taken.drafting_forwards, taken.cloud_forwards = forwards["device"], forwards["cloud"]
    taken.joules = COMPUTE_W * setting.draft * forwards["device"] if way.spends else 0.0
    if way.strategy != "draft_verify":
        return taken
    device = world.session("device").finished
    assert device is not None, "both machines have ended"
    taken.drafted, taken.accepted = device.stats["drafted"], device.stats["accepted"]
    sent = [each.message for each in world.messages]
    taken.rounds = sum(isinstance(each, DraftChain) and (each.last or not each.places) for each in sent)
    taken.draft_bytes = world.session("device").egress.kinds().get("drafts", 0)
    if way.spends:
        (link,) = world.links.values()
        taken.up_s = link.airtime["device"]
        taken.joules += SEND_W * link.airtime["device"]
        taken.joules += RECEIVE_W * link.airtime["cloud"] if way.down_bits else 0.0
    return taken


def airbytes(message: SessionFrame, way: Way, payload: Payload) -> float | None:
    """Size of a message as the way's paper has it; None: as the codec writes it."""
    match message:
        case DraftChain() if way.payload == "scalars":
            return len(decode_places(message.places)) * ENTRY_BITS / 8.0
        case DraftChain() if way.payload != "ids":
            top_p = float(way.payload.removeprefix("top-p "))
            ids = sum(payload.ids(nats_of(token), top_p) for token, _ in decode_places(message.places))
            return ids * ENTRY_BITS / 8.0
        case Targets() if way.down_bits:
            verified = getattr(way.options, "most", 0)
            return way.down_bits / 8.0 if len(message.tokens) <= verified else None
        case _:
            return None
