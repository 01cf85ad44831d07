"""Everything that travels on the link, in one file. Each struct is tagged with an explicit name.

A rename of a class is not a protocol change; a change of a tag or field is, and raises VERSION.
Strings and lists have limits here so that the decoder refuses what is too large before anything else sees it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from paceline.core.sampling.constraint import MAX_TEXT, ConstraintKind

VERSION = 4  # 4: Sampling.repetition_penalty; masks of schemas close objects that name properties
SUBPROTOCOL = "paceline.v1"

Name = Annotated[str, msgspec.Meta(max_length=256)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=1_048_576)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SessionNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base: an array of the fields in this order, so that names cost no bytes; one too many is an error."""


class _Message(_Part, frozen=True, tag_field="t"):
    """What may stand alone in a frame: its array begins with the tag."""


# ---- connection -----------------------------------------------------------------------------------------------------
class Hello(_Message, frozen=True, tag="hello"):
    """First message, from the device."""

    version: Count
    device: Name
    credential: Hash
    tokenizer: Hash
    model: Hash  # fingerprint
    model_name: Name
    strategies: Annotated[list[Name], msgspec.Meta(max_length=64)]
    documents: Count  # how many this side could search; never which


class Welcome(_Message, frozen=True, tag="welcome"):
    """The cloud's answer. `strategies` are those both sides know."""

    version: Count
    tokenizer: Hash
    model: Hash
    model_name: Name
    strategies: Annotated[list[Name], msgspec.Meta(max_length=64)]
    documents: Count


class Ping(_Message, frozen=True, tag="ping"):
    sent_at: float  # s, the sender's clock; comes back in Pong


class Pong(_Message, frozen=True, tag="pong"):
    sent_at: float
    held_s: float  # between receiving the ping and answering it


class Drain(_Message, frozen=True, tag="drain"):
    """No new sessions, please: this side is going away once the open ones have ended."""


# ---- sessions -------------------------------------------------------------------------------------------------------
class ChatMessage(_Part, frozen=True):
    role: Name
    content: Text


class Sampling(_Part, frozen=True):
    """`core.sampling.sampler.SamplingParams` on the wire. `seed` is always set: the front has drawn one if need be."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)]
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)]
    top_k: Count
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)]
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)]
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)]
    logit_bias: Annotated[list[tuple[Token, Bias]], msgspec.Meta(max_length=1024)]
    seed: Seed
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)]


class DraftLimits(_Part, frozen=True):
    """How far and how broadly each side drafts."""

    width: Annotated[int, msgspec.Meta(ge=1, le=64)]  # guesses for each next token: 1 makes chains
    rows: Annotated[int, msgspec.Meta(ge=1, le=256)]  # in one forward
    ahead: Annotated[int, msgspec.Meta(ge=0, le=256)]  # tokens beyond the last target; 0: token by token
    burst: bool  # ship a whole chain of `ahead` drafts at once, not each when it is there


class Constraint(_Part, frozen=True):
    """core.sampling.constraint.Constraint on the wire."""

    kind: ConstraintKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class OpenSession(_Message, frozen=True, tag="open"):
    """The front asks its peer to take part in one generation, from `targets` on.

    With the strategy `search` a device asks for passages alone: `query` and `top_k_documents` count, the rest is empty,
    and the answer is `Found`.

    Session numbers are chosen by the opener: even by the cloud, odd by the device, never used twice on a connection.
    """

    session: SessionNumber
    strategy: Name
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=1000)]
    query: Text  # what to search documents for
    sampling: Sampling
    max_tokens: Count
    top_k_documents: Count
    privacy: Name
    aggregator: Name  # of aggregation; empty where the strategy has none
    needs_dists: bool  # distributions are wanted for logprobs, not for the choice alone
    rescoring: bool  # scores of documents follow the text
    drafting: DraftLimits
    targets: Annotated[list[Token], msgspec.Meta(max_length=131_072)]
    epoch: Count  # how often this answer has been opened before; what was said under another epoch counts no more
    constraint: Constraint | None  # what the text must look like; each side masks its own law


class CloseSession(_Message, frozen=True, tag="close"):
    """This side has ended its part. `reason` is a FinishReason, or a sentence after "refused: "."""

    session: SessionNumber
    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class DistPayload(_Part, frozen=True):
    """A truncated distribution: true probabilities, not renormalised; the mass left off is what they lack of 1.

    Packed and unpacked by wire.dist_codec.
    """

    ids: Annotated[bytes, msgspec.Meta(max_length=1_048_576)]  # varints: the first id, then each step less 1
    probs: Annotated[bytes, msgspec.Meta(max_length=1_048_576)]  # (kept,) little-endian uint16, or float64


class Drafts(_Message, frozen=True, tag="d"):
    """What the sender predicts after some prefixes: nodes of the tree it drafts, packed by wire.tree_codec.

    The tree hangs on an anchor, a node whose prefix is decided. Tags of what is sent for every token are short.
    """

    session: SessionNumber
    epoch: Count
    nodes: Annotated[bytes, msgspec.Meta(max_length=65_536)]
    # One a node; none where choices are shipped, and then the field is left out.
    dists: Annotated[list[DistPayload], msgspec.Meta(max_length=256)] = []


class EvidenceWeight(_Message, frozen=True, tag="w"):
    """What the sender's documents weigh together: log h; None: it found none."""

    session: SessionNumber
    epoch: Count
    log_weight: float | None


class DetailRequest(_Message, frozen=True, tag="more"):
    """A node's law does not settle the choice: send more of it."""

    session: SessionNumber
    epoch: Count
    node: Count
    level: Annotated[int, msgspec.Meta(ge=1, le=2)]  # core.aggregation.registry.LAST_LEVEL


class Targets(_Message, frozen=True, tag="t"):
    """Decided output tokens from `start` on."""

    session: SessionNumber
    epoch: Count
    start: Count
    tokens: Annotated[list[Token], msgspec.Meta(max_length=131_072)]
    lanes: Annotated[bytes, msgspec.Meta(max_length=131_072)]  # one per token: 0 none, 1 cloud, 2 device; or empty


class Handover(_Message, frozen=True, tag="turn"):
    """The receiver decides from output position `start` on. Sent by the side that decided until then."""

    session: SessionNumber
    epoch: Count
    turn: Count  # hand-overs so far, this one included
    start: Count


class SpeedReport(_Message, frozen=True, tag="pace"):
    """How fast the sender computes, for the choice of who decides."""

    session: SessionNumber
    epoch: Count
    decode_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]  # s, a forward of one row
    row_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]  # s, each further row


class SyncState(_Message, frozen=True, tag="have"):
    """Sent when nothing has come for a while: what the sender holds, so that the receiver can send the rest again."""

    session: SessionNumber
    epoch: Count
    turn: Count
    targets: Count  # output tokens decided, as far as the sender knows, without a gap
    waits: bool  # it decides, and lacks a law of the receiver


class RetrievedPassage(_Part, frozen=True):
    """A passage the sender reads. From a device, `document` and `text` are empty: they are private."""

    document: Annotated[str, msgspec.Meta(max_length=1024)]
    text: Annotated[str, msgspec.Meta(max_length=16_384)]
    score: float


class RetrievedPassages(_Message, frozen=True, tag="found"):
    """What the peer's search found, for the citations of the answer. For the driver; no machine sees it."""

    session: SessionNumber
    passages: Annotated[list[RetrievedPassage], msgspec.Meta(max_length=64)]


SessionMessage = Drafts | EvidenceWeight | DetailRequest | Targets | Handover | SpeedReport | SyncState
Message = Hello | Welcome | Ping | Pong | Drain | OpenSession | CloseSession | RetrievedPassages | SessionMessage
