"""Ways to write an answer: the served machine as a request or `auto` would use it, and what it is compared with.

The static schemes, DSSD and GELATO are the served machine with other options: they verify with common noise, which on
the bench's engines accepts what rejection sampling accepts, and what they send is sized as their papers say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.core.side import Side
from paceline.wire.messages import DEFAULT_OPTIONS, Options
from paceline.wire.verify_messages import VerifyOptions

Payload = Literal["ids", "top-p 0.99995", "top-p 0.99998", "scalars"]

OURS: Final = VerifyOptions(rescoring=False)


def waiting(most: int, *, overlap: bool = False) -> VerifyOptions:
    """Each step drafts so many tokens, and the cloud waits for them. As published: without second guesses, which find
    nothing on these engines anyway."""
    return VerifyOptions(rescoring=False, waits=True, overlap=overlap, fixed=True, most=most, second_guesses=False)


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    options: Options = field(default=OURS)
    strategy: str = "draft_verify"
    front: Side = "device"
    payload: Payload = "ids"
    down_bits: float = 0.0  # sent down after a rejection, beside the verdict
    budget: float | None = None  # J
    per: Literal["step", "token"] = "step"  # of the budget
    in_cloud: bool = False  # the draft model too

    @property
    def spends(self) -> bool:
        """The device computes."""
        return not self.in_cloud and not (self.strategy == "lookup_tree" or self.name == "cloud decoding")


CLOUD_DECODING: Final = Way("cloud decoding", VerifyOptions(rescoring=False, most=0))
DEVICE_DECODING: Final = Way("device alone", DEFAULT_OPTIONS, "autoregressive")
LOOKUP_IN_CLOUD: Final = Way("lookup_tree in the cloud", DEFAULT_OPTIONS, "lookup_tree", "cloud")


def static(drafts: int, payload: Payload = "ids") -> Way:
    sent = "" if payload == "ids" else f", {payload}"
    return Way(f"static {drafts}{sent}", waiting(drafts), payload=payload)


def co_located(drafts: int) -> Way:
    """Draft and target model beside each other in the cloud; the text is streamed down."""
    return Way(f"co-located {drafts}", waiting(drafts), front="cloud", in_cloud=True)


def dssd(down_bits: float, name: str = "DSSD") -> Way:
    """DSSD with 7 drafts: an id and a probability of each go up, a distribution comes down after a rejection."""
    return Way(name, waiting(7), payload="scalars", down_bits=down_bits)


def gelato(payload: Payload = "top-p 0.99995") -> Way:
    """The served machine in the paper's conditions: steps, gate and budget, a draft at least."""
    options = VerifyOptions(rescoring=False, waits=True, overlap=False, least=1)
    return Way("GELATO" if payload != "ids" else "GELATO, ids", options, payload=payload, budget=1.2)


def at_most(drafts: int, *, overlap: bool = False) -> Way:
    """Ours in steps of so many drafts, for less energy."""
    ahead = ", drafting ahead" if overlap else ""
    return Way(f"ours, {drafts} a step{ahead}", waiting(drafts, overlap=overlap))


def within(joules: float) -> Way:
    """Ours with a budget of so many joules for each token of the answer."""
    return Way(f"ours, {joules:g} J a token", budget=joules, per="token")
