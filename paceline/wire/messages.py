"""Messages of the link. Each struct is tagged with an explicit name.

Renaming a class is not a protocol change; changing a tag or field is, and raises VERSION.
Strings and lists are bounded so that the decoder refuses oversized ones before any other code runs.

A strategy adds its messages as subclasses of `SessionMessage`, and its options as a subclass of `Options`;
messages of the strategies in this package are defined here, others are added with `wire.codec.register`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

import msgspec

from paceline.core.offloading import Unit
from paceline.core.sampling.sampler import MAX_BIASES, MAX_STOP_IDS, MAX_TEMPERATURE, MAX_TEXT, ConstraintKind
from paceline.core.side import MAX_NAMES, Side, WayOfReading
from paceline.wire.payloads import are_sources, pack_dists, pack_targets, unpack_dists, unpack_nodes, unpack_targets

# Types of the fields of messages, each with its limit, and the bases of the messages themselves.


MAX_FRAME_BYTES = 1 << 20
MAX_CONTROL_BYTES = 1 << 16
KEY_BYTES = 32  # an Ed25519 public key, RFC 8032; the private one is a seed of the same length
SIGNATURE_BYTES = 64
NONCE_BYTES = 32

Name = Annotated[str, msgspec.Meta(max_length=256)]
Hash = Annotated[str, msgspec.Meta(max_length=128)]
Mark = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=1_048_576)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # no infinity, nor NaN
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
SessionNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class SentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base: encoded as an array of the fields in this order, without names; an additional field is an error."""


class Frame(SentPart, frozen=True, tag_field="t"):
    """Base of a message that fills a frame: its array begins with the tag."""

    max_bytes: ClassVar[int] = MAX_CONTROL_BYTES  # limit of its frame

    def fault(self, vocab_size: int | None) -> str | None:  # noqa: ARG002  # for others
        """Description of fields that contradict each other or the vocabulary; None without a fault.

        Types, ranges and lengths have been checked. vocab_size: None if unknown.
        """
        return None


# Messages by which the two ends of a link prove who they are, and by which a device's key is renewed.
#
# What each signature covers is defined in `wire.identity`: `DiallerHandshake`, `DeviceRenewal`.


MAX_INTRODUCTION_BYTES = 32_768
MAX_KEYS = 2  # that a device holds at once: in use, and not yet confirmed

# An encoded `Introduction`; nothing between head and stages.
IntroductionBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_INTRODUCTION_BYTES)]


class Hello(Frame, frozen=True, tag="hello"):
    """First message, from whoever has dialled: all that it tells a listener that has not proved its key."""

    version: Count
    device: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]  # of a head or stage: what it dials for
    nonce: Nonce


class Challenge(Frame, frozen=True, tag="challenge"):
    """The listener's reply to Hello: proof of its key, which a device pinned when it enrolled, and a nonce to sign."""

    version: Count
    name: Name  # of a stage, by which its head knows its key
    nonce: Nonce
    signature: Signature  # by the listener's key


class RelevanceScale(SentPart, frozen=True):
    """The scale of a side's relevance. Scores of two sides can be compared only if their embedders are equal."""

    embedder: Hash  # fingerprint of its weights, not its name
    temperature: Annotated[float, msgspec.Meta(ge=0.01, le=100)]  # divides a cosine; the cloud's holds for both


class Introduction(SentPart, frozen=True):
    """A side's description of itself."""

    tokenizer: Hash  # fingerprint
    model: Hash  # fingerprint
    model_name: Name
    strategies: Annotated[list[Name], msgspec.Meta(max_length=64)]
    documents: Count  # number this side can search; never which
    # Of a device: names of the cloud's keys whose clients may have it read its documents; null: all. It checks them.
    asked_by: Annotated[list[Name], msgspec.Meta(max_length=MAX_NAMES)] | None = msgspec.field(default_factory=list)
    num_weights: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0  # of the model; 0: unknown
    relevance: RelevanceScale | None = None  # None: it keeps no documents


class Proof(Frame, frozen=True, tag="proof"):
    """The dialler's reply to Challenge: its introduction, signed by each key that it holds.

    A device holds two while a renewal is unconfirmed; one that the cloud accepts is enough.
    """

    introduction: IntroductionBytes
    signatures: Annotated[list[Signature], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]


class Welcome(Frame, frozen=True, tag="welcome"):
    """The listener's reply to Proof: the dialler is admitted. The strategies in `introduction` are those of both
    sides."""

    introduction: IntroductionBytes
    key: PublicKey  # of the dialler, as the listener holds it; a device drops any other
    signature: Signature  # by the listener's key


class RenewKey(Frame, frozen=True, tag="renew"):
    """The cloud asks the device for a new key. Sessions go on meanwhile."""


class NewKey(Frame, frozen=True, tag="newkey"):
    """The device's reply to RenewKey. It has stored the new key beside the present one."""

    key: PublicKey
    signature: Signature  # by the present key
    possession: Signature  # by the new key


class KeyKept(Frame, frozen=True, tag="kept"):
    """The cloud has stored the new key and accepts no other from now on; the device drops the former."""

    signature: Signature  # by the cloud's key


IDENTITY_MESSAGES: tuple[type[Frame], ...] = (Hello, Challenge, Proof, Welcome, RenewKey, NewKey, KeyKept)


VERSION = 1
SUBPROTOCOL = "paceline.v1"

MAX_OPTIONS_BYTES = 4096
MAX_TEMPLATE = 4096  # characters of the JSON of a chat template's variables
LAST_TOKEN = 2**31 - 1
LANES = bytes(range(3))


class SessionFrame(Frame, frozen=True):
    """Base of every message of a session: its opening, its end, and the messages between them."""

    kind: ClassVar[str]  # name of its byte count in an answer's stats and log

    session: SessionNumber


class SessionMessage(SessionFrame, frozen=True):
    """Base of the messages between the two machines of a session. Link, egress, limits and simulator dispatch on it."""

    compact_code: ClassVar[int | None] = None  # 1 to 31; None: no short form (`wire.payloads.pack`)
    compact_numbers: ClassVar[int] = 0  # behind session and epoch in it

    epoch: Count  # epoch of the opening it belongs to; a message of another epoch is dropped

    def to_compact(self) -> tuple[list[int], bytes] | None:
        """Numbers and last bytes of the short form; None: this message is sent as an array."""
        return None

    @classmethod
    def from_compact(cls, numbers: list[int], rest: bytes) -> Sequence[object]:
        """Fields behind session and epoch, unchecked. Raises RemoteProtocolError."""
        raise AssertionError(f"no short form: {numbers}, {rest!r}")


# ---- connection -----------------------------------------------------------------------------------------------------
class Ping(Frame, frozen=True, tag="ping"):
    sent_at: Finite  # s, the sender's clock; returned in Pong
    documents: Count | None = None  # number that the sender can search now; None: as it said last


class Pong(Frame, frozen=True, tag="pong"):
    sent_at: Finite
    held_s: Finite  # between receiving the ping and answering it


class Drain(Frame, frozen=True, tag="drain"):
    """The sender takes no new sessions and closes the link when the open ones have ended."""


# ---- sessions -------------------------------------------------------------------------------------------------------
class ChatMessage(SentPart, frozen=True):
    role: Name
    content: Text


class Sampling(SentPart, frozen=True):
    """`core.sampling.sampler.SamplingParams` on the wire. `seed` is always set: the side that faces the client draws
    one if the request has none."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=MAX_TEMPERATURE)]
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)]
    top_k: Count
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)]
    presence_penalty: Bias
    frequency_penalty: Bias
    logit_bias: Annotated[list[tuple[Token, Bias]], msgspec.Meta(max_length=MAX_BIASES)]
    seed: Seed
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=10)]


class SentThinking(SentPart, frozen=True):
    """`core.sampling.sampler.Thinking` on the wire."""

    begin: Mark
    end: Mark
    begun: bool
    budget: Count | None


class SentConstraint(SentPart, frozen=True):
    """`core.sampling.sampler.Constraint` on the wire."""

    kind: ConstraintKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    min_tokens: Count
    ignore_eos: bool
    stop_ids: Annotated[list[Token], msgspec.Meta(max_length=MAX_STOP_IDS)]
    thinking: SentThinking | None = None


class OpenSession(SessionFrame, frozen=True, tag="open"):
    """The side that faces the client asks its peer to take part in one generation, from `targets` on.

    With the strategy `search` a device asks for passages only: `query` and `top_k_documents` are used, the other fields
    are empty, and the reply is `RetrievedPassages`.

    With the strategy `write` a device asks for a text of a workflow's agent, which reads nothing private: `messages`,
    `sampling`, `max_tokens`, `privacy` and `cache_key` are used, and the reply is `WrittenText`, many times.

    The opener chooses the session number: even on the cloud, odd on the device, above all numbers it has seen on the
    connection, by no more than 2**20. Where answers compete for memory, both sides prefer the one of the lower number.
    """

    kind = "open"
    max_bytes = MAX_FRAME_BYTES

    strategy: Name
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=1000)]
    query: Text  # of `search`; otherwise empty, since each side derives its query from `messages`
    sampling: Sampling
    max_tokens: Count
    top_k_documents: Count
    privacy: Name
    options: msgspec.Raw  # the strategy's options as an array of their fields, see `Options`
    targets: Annotated[list[Token], msgspec.Meta(max_length=131_072)]
    epoch: Count  # number of earlier openings of this answer; messages of another epoch are dropped
    constraint: SentConstraint | None  # on the text; each side masks its own distributions
    asker: Name  # from a cloud: name of the client's key; empty for a client without one, and from a device
    # From a device, random: the cloud shares KV among this device's openings with the same key. Empty: with none.
    cache_key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    trace: Name = ""  # random id of the client's request, for the logs of both sides
    template: Annotated[str, msgspec.Meta(max_length=MAX_TEMPLATE)] = ""  # JSON: further variables of chat templates

    def fault(self, vocab_size: int | None) -> str | None:
        biased = [token for token, _ in self.sampling.logit_bias]
        if len(set(biased)) != len(biased):
            return "logit_bias names a token twice - at `$.sampling.logit_bias`"
        if len(bytes(self.options)) > MAX_OPTIONS_BYTES:
            return f"options of more than {MAX_OPTIONS_BYTES} bytes - at `$.options`"
        if not _is_object(self.template):
            return "no JSON object - at `$.template`"
        return bad_tokens("targets", self.targets, 0, vocab_size) or (
            bad_tokens("sampling.logit_bias", biased, 0, vocab_size)
        )


REFUSED: Final = "refused: "  # begins the reason with which a side closes a session that it does not take part in


class CloseSession(SessionFrame, frozen=True, tag="close"):
    """The sender leaves the session. `reason` is a FinishReason, or a sentence after "refused: "."""

    kind = "close"

    reason: Annotated[str, msgspec.Meta(max_length=1024)]


class Approximate(SessionFrame, frozen=True, tag="about"):
    """The sender's engine cannot tell exactly which tokens it would write alone: those that it has sent, or sends from
    now on, may be others. For the report of the answer; no machine receives it."""

    kind = "about"


class DistPayload(SentPart, frozen=True):
    """A truncated distribution: probabilities of the full one, not renormalised; the tail mass is 1 less their sum.

    Encoded and decoded by `wire.codec`.
    """

    ids: Annotated[bytes, msgspec.Meta(max_length=1_048_576)]  # varints: the first id, then each difference less 1
    probs: Annotated[bytes, msgspec.Meta(max_length=1_048_576)]  # (kept,) little-endian uint16, or float64


class Drafts(SessionMessage, frozen=True, tag="d"):
    """Nodes of the sender's draft tree, encoded by `wire.payloads.pack_nodes`, with its prediction after each.

    The root of the tree is an anchor, a node whose prefix is decided. Messages sent for every token have short tags.
    Distributions are decoded once, where they are used: a bad one is ignored there.
    """

    kind = "drafts"
    max_bytes = MAX_FRAME_BYTES
    compact_code = 2
    compact_numbers = 1  # bytes of `nodes`, where distributions follow

    nodes: Annotated[bytes, msgspec.Meta(max_length=65_536)]
    # One per node; none where choices are sent.
    dists: Annotated[list[DistPayload], msgspec.Meta(max_length=256)] = []  # msgspec copies it

    def fault(self, vocab_size: int | None) -> str | None:
        nodes = unpack_nodes(self.nodes, vocab_size)
        expected = len(nodes.tokens) if nodes.choices is None else 0
        if len(self.dists) != expected:
            return f"{len(self.dists)} distributions where there must be {expected} - at `$.dists`"
        return None

    def to_compact(self) -> tuple[list[int], bytes] | None:
        if not (self.dists and self.nodes):
            return None if self.dists else ([0], self.nodes)  # distributions alone are a fault
        return [len(self.nodes)], self.nodes + pack_dists([(dist.ids, dist.probs) for dist in self.dists])

    @classmethod
    def from_compact(cls, numbers: list[int], rest: bytes) -> Sequence[object]:
        (length,) = numbers
        return [rest[:length], unpack_dists(rest[length:])] if length else [rest]


class EvidenceWeight(SessionMessage, frozen=True, tag="w"):
    """Total evidence weight of the sender's documents, log h; None: it retrieved none."""

    kind = "weight"

    log_weight: Finite | None


class DetailRequest(SessionMessage, frozen=True, tag="more"):
    """Request for more of a node's distribution, which does not determine the choice yet."""

    kind = "wanted"

    node: Count
    level: Annotated[int, msgspec.Meta(ge=1, le=2)]  # core.aggregation.aggregators.LAST_LEVEL


TOKEN_BYTES = 4  # of a token that is kept


class Targets(SessionMessage, frozen=True, tag="t"):
    """Decided output tokens from `start` on."""

    kind = "targets"
    max_bytes = MAX_FRAME_BYTES
    compact_code: ClassVar[int | None] = 3
    compact_numbers = 1

    start: Count
    tokens: Annotated[list[Token], msgspec.Meta(max_length=131_072)]
    lanes: Annotated[bytes, msgspec.Meta(max_length=131_072)]  # one per token: 0 none, 1 cloud, 2 device; or empty
    # One per token, 0 that token, 1 or 2 in place of it (0) the choice that the receiver or the sender has sent after
    # its prefix; or empty. Not with lanes.
    sources: Annotated[bytes, msgspec.Meta(max_length=131_072)] = b""
    # The distribution that each came from, for logprobs at the receiver; or none.
    dists: Annotated[list[DistPayload], msgspec.Meta(max_length=131_072)] = []  # msgspec copies it

    def fault(self, vocab_size: int | None) -> str | None:
        if self.lanes and len(self.lanes) != len(self.tokens):
            return f"{len(self.lanes)} lanes for {len(self.tokens)} tokens - at `$.lanes`"
        if self.lanes.strip(LANES):
            return "a lane is neither 0, 1 nor 2 - at `$.lanes`"
        if self.sources and not are_sources(self.sources, self.tokens, self.lanes):
            return "sources are not those of the tokens - at `$.sources`"
        if self.dists and len(self.dists) != len(self.tokens):
            return f"{len(self.dists)} distributions for {len(self.tokens)} tokens - at `$.dists`"
        return bad_tokens("tokens", self.tokens, self.start, vocab_size)

    @property
    def num_bytes(self) -> int:
        """Memory of its tokens and distributions, about."""
        return TOKEN_BYTES * len(self.tokens) + sum(len(dist.ids) + len(dist.probs) for dist in self.dists)

    def to_compact(self) -> tuple[list[int], bytes] | None:
        wrong_lanes = self.lanes and (len(self.lanes) != len(self.tokens) or self.lanes.strip(LANES))
        if self.dists or wrong_lanes or (self.sources and not are_sources(self.sources, self.tokens, self.lanes)):
            return None  # distributions, or a fault, see above
        return [self.start], pack_targets(self.tokens, self.lanes, self.sources)

    @classmethod
    def from_compact(cls, numbers: list[int], rest: bytes) -> Sequence[object]:
        return [*numbers, *unpack_targets(rest)]


class Handover(SessionMessage, frozen=True, tag="turn"):
    """The receiver decides from output position `start` on. Sent by the side that has decided until then."""

    kind = "handover"

    turn: Count  # handovers so far, this one included
    start: Count


class SpeedReport(SessionMessage, frozen=True, tag="pace"):
    """Speed of the sender's engine, for the choice of the deciding side."""

    kind = "pace"

    decode_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]  # s, a forward of one row
    row_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]  # s, each further row


class SyncState(SessionMessage, frozen=True, tag="have"):
    """State of the sender after a time without progress, so that the receiver can send lost messages again."""

    kind = "have"

    turn: Count
    targets: Count  # decided output tokens that the sender has received, without a gap
    waits: bool  # the sender lacks what the receiver computes: as the side that decides a distribution, else targets


class RetrievedPassage(SentPart, frozen=True):
    """A passage in a prompt of the sender. From a device, all but the score is empty: it is private."""

    document: Annotated[str, msgspec.Meta(max_length=1024)]
    text: Annotated[str, msgspec.Meta(max_length=16_384)]
    score: Finite
    place: Annotated[str, msgspec.Meta(max_length=256)] = ""  # in the document, for people
    chunk: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0  # its id at the sender, which shows it under that; 0: none


class RetrievedPassages(SessionFrame, frozen=True, tag="found"):
    """Passages in the sender's prompts, for the citations of the answer. For the session; no machine receives it."""

    kind = "found"
    max_bytes = MAX_FRAME_BYTES

    passages: Annotated[list[RetrievedPassage], msgspec.Meta(max_length=64)]
    unanswered: bool = False  # of a cloud: it found some, and none answers; a device says only that it read none


class WrittenText(SessionFrame, frozen=True, tag="text"):
    """The next piece of a text that the sender's model writes for the receiver, see `OpenSession`. For the session; no
    machine receives it. The text ends with `CloseSession`, its reason `stop` or `length`."""

    kind = "text"
    max_bytes = MAX_FRAME_BYTES

    text: Annotated[str, msgspec.Meta(max_length=16_384)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=4096)]  # that the piece is of; the last one may have no text


CONTROL_MESSAGES: tuple[type[Frame], ...] = (
    *IDENTITY_MESSAGES,
    Ping,
    Pong,
    Drain,
    OpenSession,
    CloseSession,
    Approximate,
    RetrievedPassages,
    WrittenText,
)
STRATEGY_MESSAGES: tuple[type[SessionMessage], ...] = (
    Drafts,
    EvidenceWeight,
    DetailRequest,
    Targets,
    Handover,
    SpeedReport,
    SyncState,
)
# Strategies that an opening names though no machine takes part, see `OpenSession`.
SEARCH: Final = "search"
WRITE: Final = "write"
Message = Hello | Challenge | Proof | Welcome | RenewKey | NewKey | KeyKept | Ping | Pong | Drain | SessionFrame


def _is_object(text: str) -> bool:
    """An empty text stands for an empty object."""
    try:
        return not text or isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def bad_tokens(path: str, tokens: list[int], start: int, vocab_size: int | None) -> str | None:
    """Description of token ids outside the vocabulary or positions above the limit; None without a fault."""
    if start + len(tokens) > LAST_TOKEN:
        return f"positions beyond {LAST_TOKEN} - at `$.{path}`"
    if vocab_size is not None and tokens and max(tokens) >= vocab_size:
        return f"a token id outside the vocabulary of {vocab_size} - at `$.{path}`"
    return None


# Options of strategies, as an opening carries them and machines are configured with them. Those of the strategies in
# this package that need more than the common ones are here or beside their machines.


MIN_STRETCH: Final = 8  # tokens: each stretch begins with a search and a round trip
MAX_STRETCH: Final = 131_072  # of the longest answer


def stretch_of(length: int, every: int, limit: int) -> tuple[int, int]:
    """Begin and end of the stretch in which the token at position `length` is.

    every: tokens of a stretch; 0: the whole answer is one. limit: tokens of the answer, which ends the last one sooner.
    """
    if every <= 0:
        return 0, limit
    begin = length // every * every
    return begin, min(limit, begin + every)


class DraftLimits(SentPart, frozen=True):
    """Limits of a side's draft tree."""

    width: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4  # drafts for each next token; 1 makes chains, as in DRAGON
    rows: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16  # in one forward of one branch
    ahead: Annotated[int, msgspec.Meta(ge=0, le=256)] = 32  # tokens beyond the last target; 0: token by token
    whole_sequences: bool = False  # send chains of `ahead` drafts as a whole, not each draft once computed


class Options(SentPart, frozen=True):
    """Options of a strategy, carried whole by request, opening and machine. A strategy with more options subclasses
    this."""

    rescoring: bool = True  # document scores are updated with the text, see `core.aggregation.weights.decayed_evidence`
    drafting: DraftLimits = DraftLimits()
    # How a side reads its passages; empty: by its model.
    reading: WayOfReading | Literal[""] = ""
    # Passages are read only where the reader finds an answer in one of a side's, see `runtime.questions`.
    judged: bool = False

    @property
    def stats_kind(self) -> str:
        """Kind of answers that share measured statistics, see `core.drafting.budget.OnlineStats`."""
        return ""

    @property
    def energy_budget(self) -> tuple[float, Unit] | None:
        """The request's energy budget, J a unit, as `core.offloading.EnergyQueue` keeps it; None: none."""
        return None

    @property
    def stretch(self) -> int:
        """Tokens between two searches for documents, see `stretch_of`; 0: there is one search."""
        return 0

    def in_one_stretch(self) -> Self:
        """The same options with one search."""
        return self


DEFAULT_OPTIONS = Options()


class AggregateOptions(Options, frozen=True):
    """Options of `aggregate`."""

    aggregator: Name = ""  # empty: `aggregate` selects one
    needs_dists: bool = False  # distributions are needed for logprobs, not only to choose the token
    # Tokens after which each side searches again, with the question and the answer so far; 0: never.
    search_every: Annotated[int, msgspec.Meta(ge=0, le=MAX_STRETCH)] = 0
    writer: Side | None = None  # that has all weight where neither has found a document; None: both write

    @property
    def stretch(self) -> int:
        return self.search_every

    def in_one_stretch(self) -> Self:
        return msgspec.structs.replace(self, search_every=0)

    @property
    def stats_kind(self) -> str:
        return self.aggregator
