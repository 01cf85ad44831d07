"""Options and messages of `draft_verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from paceline.core.offloading import Unit
from paceline.core.verification import VerifierName
from paceline.wire.messages import (
    MAX_FRAME_BYTES,
    Count,
    DistPayload,
    Options,
    SessionMessage,
    Targets,
    Token,
    bad_tokens,
)
from paceline.wire.payloads import MAX_PLACE_BYTES, PROB_BYTES, decode_places

Joules = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
MAX_CHAIN = 256  # drafted tokens below one prefix of targets
MAX_DIST_BYTES = 32_768  # of the distribution of one draft


class VerifyOptions(Options, frozen=True):
    """Options of `draft_verify`."""

    most: Annotated[int, msgspec.Meta(ge=0, le=64)] = 15  # drafts of one step (γ0)
    least: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # likewise; 1 as in the paper
    fixed: bool = False  # every step drafts `most` tokens, as static speculative decoding does
    gate: bool = True  # drafting stops early where the draft model is unsure
    overlap: bool = True  # drafting goes on while a verdict is on its way
    waits: bool = False  # the verifier waits for drafts; else it decodes meanwhile
    second_guesses: bool = True  # beside drafts that are unsure another token is verified: *agreement* alone
    needs_dists: bool = False  # verdicts carry distributions, for logprobs
    joules_per_step: Joules | None = None  # energy budget of the device's drafting
    joules_per_token: Joules | None = None  # likewise; not both
    verifier: VerifierName = "agreement"  # see `core.verification`; the other two wait for drafts
    mass: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.99995  # of a draft distribution that `truncated` sends (top-p)

    @property
    def stats_kind(self) -> str:
        return "draft_verify"

    @property
    def energy_budget(self) -> tuple[float, Unit] | None:
        if self.joules_per_token is not None:
            return self.joules_per_token, "token"
        return None if self.joules_per_step is None else (self.joules_per_step, "step")


class DraftChain(SessionMessage, frozen=True, tag="c"):
    """Drafted tokens of `draft_verify`: the next ones of a chain that hangs below the first `base` targets. With what
    each was drawn from, for the verifiers `rejection` and `truncated`."""

    kind = "drafts"
    max_bytes = MAX_FRAME_BYTES
    compact_code = 1
    compact_numbers = 2

    base: Count
    offset: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHAIN)]  # tokens of this chain that were sent before
    places: Annotated[
        bytes, msgspec.Meta(max_length=MAX_PLACE_BYTES * MAX_CHAIN)
    ]  # a draft each, some with a second guess: `wire.payloads.encode_places`; none: no more drafts
    last: bool = False  # no more drafts follow these, until the next verdict
    recovered: Token | None = None  # the target before `base`, which the sender has drawn in place of a rejected draft
    # One of the two: each token's probability, or its distribution; see `wire.payloads.encode_prob`.
    probs: Annotated[bytes, msgspec.Meta(max_length=PROB_BYTES * MAX_CHAIN)] = b""
    dists: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=MAX_DIST_BYTES)]], msgspec.Meta(max_length=MAX_CHAIN)
    ] = []  # noqa: RUF012  # msgspec copies it

    def fault(self, vocab_size: int | None) -> str | None:
        places = decode_places(self.places)
        if len(self.probs) not in (0, PROB_BYTES * len(places)):
            return f"{len(self.probs)} bytes of probabilities for {len(places)} tokens - at `$.probs`"
        if len(self.dists) not in (0, len(places)):
            return f"{len(self.dists)} distributions for {len(places)} tokens - at `$.dists`"
        if self.recovered is not None and vocab_size is not None and self.recovered >= vocab_size:
            return f"a token id outside the vocabulary of {vocab_size} - at `$.recovered`"
        if self.offset + len(places) > MAX_CHAIN:
            return f"a chain of more than {MAX_CHAIN} tokens - at `$.places`"
        seconds = [second for _, second in places if second is not None]
        start = self.base + self.offset
        return bad_tokens("places", [token for token, _ in places], start, vocab_size) or (
            bad_tokens("places", seconds, start, vocab_size)
        )

    def to_compact(self) -> tuple[list[int], bytes] | None:
        more = self.last or self.recovered is not None or self.probs or self.dists
        return None if more else ([self.base, self.offset], self.places)

    @classmethod
    def from_compact(cls, numbers: list[int], rest: bytes) -> Sequence[object]:
        return [*numbers, rest]


class Rejected(Targets, frozen=True, tag="vr"):
    """Targets that end at a rejected draft: the receiver draws the next one in its place, and says so with the drafts
    below it."""

    compact_code = None

    head: DistPayload | None = None  # of the target distribution there; `wire.codec`
    plain: DistPayload | None = None  # likewise, before any processing: for logprobs
    lane: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0  # of that target, as in `lanes`

    @property
    def num_bytes(self) -> int:
        more = [dist for dist in (self.head, self.plain) if dist is not None]
        return super().num_bytes + sum(len(dist.ids) + len(dist.probs) for dist in more)


# Beside `Targets` and `SyncState`.
VERIFY_MESSAGES: tuple[type[SessionMessage], ...] = (DraftChain, Rejected)
