"""Requests for the suites of this folder: documents, sampling, fake engines; and machines played by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.configs import a_config, changed
from lab.simulation import SimulatedRequest
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, T
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.engine.sequence_table import SequenceTable
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import (
    Branch,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    Machine,
    MachineConfig,
    PassOver,
    Prune,
    Received,
    Retrieved,
    Scored,
    Send,
    Side,
    Started,
    Strategy,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.prefix_tree import PrefixNode
from paceline.wire.codec import encode_head
from paceline.wire.messages import (
    AggregateOptions,
    DraftLimits,
    Drafts,
    EvidenceWeight,
    Handover,
    Options,
    SessionMessage,
    SyncState,
    Targets,
)
from paceline.wire.payloads import EncodedNodes, pack_nodes
from tests.depth import DEPTH

VOCAB = 257
EOS = frozenset({256})
MAX_TOKENS = 24 if DEPTH > 1 else 16
QUESTION = b"user: where is the key?\nassistant: "

BRANCHES: dict[Side, tuple[Branch, ...]] = {
    "cloud": (
        Branch(tuple(b"The keys of the town hall hang in the cellar.\n" + QUESTION), 1.2),
        Branch(tuple(b"Every town has a hall.\n" + QUESTION), 0.4),
    ),
    "device": (Branch(tuple(b"I left the key with Orla.\n" + QUESTION), 1.0),),
}

SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=7),
    "filtered": SamplingParams(
        temperature=0.8, top_p=0.9, top_k=20, frequency_penalty=0.5, repetition_penalty=1.2, seed=-3
    ),
}


TOKEN_BY_TOKEN = DraftLimits(width=1, rows=1, ahead=0)
TREE, CHAIN = DraftLimits(width=3, rows=6, ahead=10), DraftLimits(width=1, rows=1, ahead=8)


@dataclass(frozen=True, slots=True)
class Manner:
    """How two sides write together."""

    rule: AggregatorName = "mixture"
    private: bool = True
    drafting: DraftLimits = TREE
    rescoring: bool = False
    tables: bool = False
    needs_dists: bool = False  # as for logprobs; else the engine samples, and hands over heads
    options: tuple[tuple[str, object], ...] = ()  # further ones of the strategy

    @property
    def only_in_distribution(self) -> bool:
        """The text's distribution is declared, and not the text: with coins of its own for what is drafted."""
        return dict(self.options).get("verifier", "agreement") != "agreement"


MANNERS: dict[str, Manner] = {
    "private trees": Manner(),
    "private chains": Manner(drafting=CHAIN),
    "token by token": Manner(drafting=DraftLimits(width=1, rows=1, ahead=0)),
    "sequences": Manner(drafting=DraftLimits(width=1, rows=1, ahead=6, whole_sequences=True)),
    "open trees": Manner(private=False),
    "private trees, rescoring": Manner(rescoring=True),
    "open trees, rescoring": Manner(private=False, rescoring=True),
    "private trees, tables": Manner(tables=True),
    "open trees, tables": Manner(private=False, tables=True),
    "open trees, rescoring, tables": Manner(private=False, rescoring=True, tables=True),
    "coin, private trees, tables": Manner("coin", tables=True),
    "coin, private trees": Manner("coin"),
    "coin, open chains": Manner("coin", False, CHAIN),
    "coin, private trees, rescoring": Manner("coin", rescoring=True),
    "coin, open trees, rescoring": Manner("coin", private=False, rescoring=True),
    "private trees, distributions": Manner(needs_dists=True),
    "open trees, rescoring, distributions": Manner(private=False, rescoring=True, needs_dists=True),
    "coin, private trees, distributions": Manner("coin", needs_dists=True),
    "paper, open trees": Manner("paper", False),
    "paper, private chains": Manner("paper", True, CHAIN),
}


def manners(strategy: Strategy) -> dict[str, Manner]:
    if strategy.text_of == "both":
        return MANNERS
    if strategy.text_of == "cloud":
        paper = ("waits", True), ("overlap", False)
        return {
            "alone": Manner(),
            "tables": Manner(tables=True),
            "rescoring, tables": Manner(rescoring=True, tables=True),
            "distributions, rescoring": Manner(rescoring=True, needs_dists=True, options=(("needs_dists", True),)),
            "distributions, tables": Manner(tables=True, needs_dists=True, options=(("needs_dists", True),)),
            "in steps": Manner(options=(*paper, ("least", 1))),
            "in steps of none or more, tables": Manner(tables=True, options=paper),
            "static": Manner(options=(*paper, ("most", 5), ("fixed", True))),
            "waits and overlaps": Manner(options=(("waits", True), ("gate", False))),
            "rejection": Manner(options=(("verifier", "rejection"),)),
            "rejection in steps, distributions, rescoring": Manner(
                rescoring=True,
                needs_dists=True,
                options=(("verifier", "rejection"), ("overlap", False), ("needs_dists", True)),
            ),
            "truncated": Manner(options=(("verifier", "truncated"),)),
            "truncated in steps, rescoring": Manner(
                rescoring=True, options=(("verifier", "truncated"), ("overlap", False), ("mass", 0.8))
            ),
        }
    return {
        "alone": Manner(needs_dists=True),
        "rescoring": Manner(rescoring=True, needs_dists=True),
        "tokens of the engine": Manner(),
        "tokens of the engine, rescoring": Manner(rescoring=True),
    }


def engines() -> dict[Side, Engine]:
    """Two different models of one vocabulary."""
    return {"cloud": FakeEngine(seed=1, spread=0.3), "device": FakeEngine(seed=1, spread=0.5)}


def job(
    strategy: Strategy,
    front: Side,
    sampling: SamplingParams,
    *,
    branches: Mapping[Side, tuple[Branch, ...]] = BRANCHES,
    max_tokens: int = MAX_TOKENS,
    eos_ids: frozenset[int] = EOS,
    room: Mapping[Side, int] | None = None,
    manner: Manner | None = None,
    **changes: Any,
) -> SimulatedRequest:
    """changes: fields of the configuration, above those of the manner."""
    options = options_for(strategy.options, {"aggregator": "mixture"})
    config = a_config(front, True, sampling, max_tokens, eos_ids, VOCAB, options)
    if manner is not None:
        asked = {"aggregator": manner.rule, "drafting": manner.drafting, "rescoring": manner.rescoring}
        config = changed(
            config,
            options=options_for(strategy.options, asked | dict(manner.options)),
            private=manner.private,
            table=LookupTable(VOCAB) if manner.tables else None,
            needs_dists=manner.needs_dists,
        )
    return SimulatedRequest(strategy, front, changed(config, **changes), branches, room or {})


def options_for(kind: type[Options], asked: Mapping[str, object]) -> Options:
    """Options of this type; without rescoring unless it is asked for."""
    fields = {"rescoring": False, **asked}
    return kind(**{name: fields[name] for name in kind.__struct_fields__ if name in fields})  # type: ignore[arg-type]


def without_documents(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    return (replace(branches[0], prompt=tuple(QUESTION), score=None),)


# ---- one machine, played by hand ------------------------------------------------------------------------------------
PROMPT = (1, 2, 3)


def point(token: int, mass: float = 0.9) -> Dist:
    """Nearly all mass on one token, the rest spread over all others."""
    probs = np.full(VOCAB, (1.0 - mass) / (VOCAB - 1))
    probs[token] = mass
    return Dist.dense(probs)


def path(node: PrefixNode) -> tuple[int, ...]:
    """Tokens from the beginning of the answer to this node."""
    return () if node.parent is None else (*path(node.parent), node.token)


class Only:
    """A constraint that lets one token follow, and nothing else."""

    def __init__(self, token: int) -> None:
        self._token = token

    def allowed(self, _: Sequence[int]) -> NDArray[np.bool_]:
        return np.arange(VOCAB) == self._token

    def complete(self, _: Sequence[int]) -> bool:
        return False

    def at_once(self, work: Callable[[], T]) -> T:
        return work()


def found(score: float | None = 0.0, room: int | None = None) -> Retrieved:
    """One branch: a document, or with None the conversation alone."""
    return Retrieved((Branch(PROMPT, score),), room)


def drafted(start: int, *tokens: int, epoch: int = 0, first: int | None = None, dist: Dist | None = None) -> Event:
    """A peer's chain of drafts from a decided prefix of that length: each distribution has nearly all mass on its
    token."""
    number = 1000 * (start + 1) if first is None else first
    parents = (-1, *range(number, number + len(tokens) - 1))
    nodes = EncodedNodes(start, 0, number, parents, (0, *tokens[:-1]), None)
    dists = [encode_head(point(token) if dist is None else dist, precise=False) for token in tokens]
    return Received(Drafts(0, epoch, pack_nodes(nodes), dists))


def weighed(log_weight: float | None = 0.0, epoch: int = 0) -> Event:
    """A peer's documents, by what they weigh."""
    return Received(EvidenceWeight(0, epoch, log_weight))


def heard(start: int, *tokens: int, epoch: int = 0, log_weight: float | None = 0.0) -> tuple[Event, Event]:
    """A peer's weight and drafts."""
    return weighed(log_weight, epoch), drafted(start, *tokens, epoch=epoch)


def decided(start: int, *tokens: int, epoch: int = 0, lanes: bytes | None = None) -> Event:
    """A peer's targets."""
    return Received(Targets(0, epoch, start, list(tokens), bytes(len(tokens)) if lanes is None else lanes))


def handed(turn: int, start: int, epoch: int = 0) -> Event:
    """A peer lets this side decide."""
    return Received(Handover(0, epoch, turn, start))


def has(targets: int, *, turn: int = 0, waits: bool = False, epoch: int = 0) -> Event:
    """A peer says what it has."""
    return Received(SyncState(0, epoch, turn, targets, waits))


class Hand:
    """A machine without engine, link or clock, given events one by one. Its rows are kept as honestly as an engine's.

    `say` is what its engine would answer after the output tokens of a path. `answer` gives these answers until none is
    wanted. `asked` are the forwards so far, `rows` what they hold: the paths whose rows were asked for.
    """

    def __init__(
        self, machine: Callable[[MachineConfig], Machine], side: Side, *, front: bool, **changes: object
    ) -> None:
        asked = {name: changes.pop(name) for name in AggregateOptions.__struct_fields__ if name in changes}
        options = options_for(AggregateOptions, asked)
        config = a_config(side, front, SamplingParams(temperature=0.0), 8, EOS, VOCAB, options, joined=True)
        self.config = changed(config, **changes)  # type: ignore[arg-type]  # any of its fields
        self.machine = machine(self.config)
        self.effects: list[Effect] = []
        self.say: Callable[[tuple[int, ...]], Dist] = lambda _: point(65)
        self.rows: list[tuple[int, ...]] = []  # output tokens on the path of every row that was asked for
        self.now = 0.0
        self.forward_s = 0.0  # of each answer
        self.silent_since: float | None = None  # the link
        self._wake_at = 0.0
        self._ledger = SequenceTable(vocab_size=VOCAB, max_positions=4096)
        self._tokens: dict[SeqId, list[int]] = {}  # committed, the prompt included
        self._waiting: list[tuple[int, list[tuple[int, ...]]]] = []  # tickets, and the paths of their wanted rows

    def on(self, *events: Event) -> list[Effect]:
        """What these events lead to."""
        effects = [effect for event in events for effect in self.machine.on(event)]
        for effect in effects:
            match effect:
                case Forward(ticket, segment):
                    self._forward(ticket, segment)
                case Prune(seq, keep, live):
                    self._tokens[seq] += self._ledger.prune(seq, keep, live).committed
                case WakeAt(time):
                    self._wake_at = time
        self.effects += effects
        return effects

    def _forward(self, ticket: int, segment: Segment) -> None:
        (placed,) = self._ledger.place(Batch((segment,)))  # raises unless it continues exactly what is written
        known = self._tokens.setdefault(segment.seq, [])
        paths = [(*known[len(PROMPT) :], *self._ledger.path(placed, row)) for row in range(len(segment.tokens))]
        if segment.start == 0:
            assert segment.tokens[: len(PROMPT)] == PROMPT
            paths = [path[len(PROMPT) :] for path in paths]
        if segment.parents is None:
            known += segment.tokens
        self._ledger.written((placed,))
        self.rows += paths
        assert len(self.rows) < 5000, "it computes for ever"
        self._waiting.append((ticket, [paths[row] for row in segment.logits_rows()]))

    def answer(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._waiting:
            effects += self.answer_one()
        return effects

    def answer_one(self) -> list[Effect]:
        ticket, paths = self._waiting.pop(0)
        self.now += self.forward_s
        return self.on(Scored(ticket, tuple(self.say(path) for path in paths), self.now))

    def begin(self, score: float | None = 0.0) -> list[Effect]:
        return [*self.on(Started(0.0), found(score)), *self.answer()]

    def wake(self, rtt: float | None = None) -> list[Effect]:
        """What the next wake-up leads to, at its time."""
        self.now = max(self.now, self._wake_at)
        silence = 0.0 if self.silent_since is None else self.now - self.silent_since
        return self.on(TimerFired(self.now, rtt, silence=silence))

    def wake_until(self, time: float, between: Callable[[], object] = lambda: None) -> list[Effect]:
        """What the wake-ups until then lead to."""
        effects: list[Effect] = []
        asked = -1.0
        while asked < self._wake_at <= time:
            asked = self._wake_at
            effects += self.wake()
            between()
        self.now = time
        return effects

    @property
    def emitted(self) -> list[Emit]:
        return [effect for effect in self.effects if isinstance(effect, Emit)]

    @property
    def tokens(self) -> list[int]:
        return [emit.token for emit in self.emitted]

    @property
    def sent(self) -> list[SessionMessage]:
        return [effect.message for effect in self.effects if isinstance(effect, Send)]

    @property
    def finish(self) -> Finish:
        """The last effect, which must be one."""
        last = self.effects[-1]
        assert isinstance(last, Finish), self.effects
        return last


def says(effects: Sequence[Effect]) -> list[SessionMessage]:
    """The messages among them."""
    return [effect.message for effect in effects if isinstance(effect, Send)]


def passed_over_after(hand: Hand, between: Callable[[], object] = lambda: None, *, limit: float = 200.0) -> float:
    """Seconds until the machine goes on without its peer."""
    start = hand.now
    while hand.now < start + limit and not (hand.effects and isinstance(hand.effects[-1], Finish)):
        if any(isinstance(effect, PassOver) for effect in hand.wake()):
            return hand.now - start
        between()
    raise AssertionError("it waits for ever")


def device(*, front: bool = True, **changes: object) -> Hand:
    return Hand(Aggregate, "device", front=front, **changes)


def cloud(*, front: bool = True, **changes: object) -> Hand:
    return Hand(Aggregate, "cloud", front=front, **changes)


def two(first: int, second: int, share: float = 0.5) -> Dist:
    """Nearly all mass on two tokens."""
    probs = np.full(VOCAB, 1e-5)
    probs[first], probs[second] = share, 0.95 - share
    return Dist.dense(probs / probs.sum())
