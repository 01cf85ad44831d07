"""Random events in random order: no machine raises, retracts, loses its rows or acts after its end.

Messages are random but of the right shape, aimed near where the machine is, so that many of them matter.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from lab.configs import a_config, changed
from paceline.core.aggregation.weights import sample_mixed_rows
from paceline.core.batching.segment import Batch
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams, sample_row
from paceline.engine.sequence_table import SequenceTable
from paceline.strategies.aggregate.machine import Aggregate
from paceline.strategies.base import (
    SIDES,
    Branch,
    Cancelled,
    Effect,
    Emit,
    Event,
    Finish,
    Forward,
    LinkBack,
    LinkLost,
    Machine,
    OpenPeer,
    Prune,
    Received,
    Retrieved,
    Sampled,
    Scored,
    Send,
    Started,
    TimerFired,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, encode, encode_head
from paceline.wire.messages import (
    AggregateOptions,
    DetailRequest,
    DistPayload,
    DraftLimits,
    Drafts,
    EvidenceWeight,
    Handover,
    SessionMessage,
    SpeedReport,
    SyncState,
    Targets,
)
from paceline.wire.payloads import FOLLOWS, YOURS, EncodedNodes, pack_nodes, unpack_nodes
from tests.strategies.cases import EOS, VOCAB

pytestmark = pytest.mark.slow

NUM_RUNS = 900
KINDS = ("quiet", "busy", "hostile")
MESSAGES = {"quiet": 0.12, "busy": 0.55, "hostile": 0.53}  # share of the events
LIKELY = 65  # the most probable token of both sides in most rows, so that answers make progress
SECRET = range(200, 206)  # tokens of prompts
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=9, frequency_penalty=1.0, presence_penalty=0.5, seed=2),
)
DRAFTINGS = (
    DraftLimits(width=2, rows=4, ahead=6),
    DraftLimits(width=1, rows=1, ahead=4),
    DraftLimits(width=1, rows=1, ahead=0),
    DraftLimits(width=1, rows=1, ahead=3, whole_sequences=True),
    DraftLimits(width=8, rows=2, ahead=2),
)


class Run:
    """One machine under random events, its effects, and the checks of each."""

    def __init__(self, seed: int, kind: str) -> None:
        self.chance = chance = random.Random(f"{kind} {seed}")
        self.kind = kind
        side, self.front = chance.choice(SIDES), chance.random() < 0.6
        strategy = STRATEGIES[chance.choice(sorted(STRATEGIES))] if self.front else STRATEGIES["aggregate"]
        self.config = a_config(
            side=side,
            faces_client=self.front,
            sampling=chance.choice(SAMPLINGS),
            max_tokens=chance.choice((1, 12, 12, 60)),
            eos_ids=EOS,
            vocab_size=VOCAB,
            targets=() if self.front else tuple(chance.randrange(VOCAB - 1) for _ in range(chance.choice((0, 0, 3)))),
            epoch=0 if self.front else chance.choice((0, 0, 5)),
            joined=strategy.needs_peer and chance.random() < 0.95,
            options=AggregateOptions(
                rescoring=chance.random() < 0.3,
                drafting=chance.choice(DRAFTINGS),
                aggregator=chance.choice(("mixture", "coin", "paper")),
                needs_dists=chance.random() < 0.1,
            ),
            private=chance.random() < 0.3,
            rtt=chance.choice((None, 0.5, 0.5)),
            table=LookupTable(VOCAB) if chance.random() < 0.6 else None,
            awaited=chance.random() < 0.2,
            needs_dists=chance.random() < 0.4,
        )
        assert isinstance(self.config.options, AggregateOptions)
        self.options = self.config.options
        if not isinstance(self.options, strategy.options):
            self.config = changed(self.config, options=strategy.options())
        self._linked = self.config.seat.joined
        self._strategy = strategy
        may_move = (
            self.config.seat.joined
            and not self.options.needs_dists
            and ((self.options.aggregator == "coin" and not self.options.rescoring) or not self.config.seat.private)
        )
        self._moved = may_move and chance.random() < 0.4  # the cloud decides
        self.machine = self.make()
        self.log: list[Event] = []
        self.effects: list[Effect] = []
        self.known = list(self.config.seat.targets)  # what has been emitted
        self.finished = False
        self._epoch, self._at = (
            self.config.seat.epoch,
            len(self.config.seat.targets),
        )  # as the machine sent its peer last
        self._ledger = SequenceTable(vocab_size=VOCAB, max_positions=10_000)
        self._pending: list[Forward] = []
        self._peer_nodes: list[tuple[int, int]] = []  # names of nodes that the peer has used, and their positions
        self._own_nodes: list[int] = []  # names that the machine has used
        self._chosen: dict[int, int] = {}  # its choices at them, under `coin`
        self._shown: dict[int, set[int]] = {}  # other tokens after them that it has shown
        self._peer_tokens: set[int] = set()  # tokens that a peer has chosen, under `coin`
        self._turn = 0
        self._now = 0.0

    def make(self) -> Machine:
        """The machine, new; with a table of its own, since another has written into the config's."""
        machine = self._strategy.machine(
            changed(self.config, table=LookupTable(VOCAB) if self.config.means.table is not None else None)
        )
        if self._moved and isinstance(machine, Aggregate):
            machine._peer.move(1, 0)
        return machine

    def play(self) -> None:
        chance = self.chance
        if chance.random() < 0.1:
            self._deliver(LinkLost())
            self._deliver(LinkBack())
        self._deliver(Started(0.0))
        searched = False
        for _ in range(chance.randrange(5, 160)):
            if not searched and chance.random() < 0.2:
                searched = True
                self._deliver(self._retrieved())
            elif (event := self._event()) is not None:
                self._deliver(event)

    def _event(self) -> Event | None:
        draw = self.chance.random()
        if draw < 0.4:
            if self._pending:
                forward = self._pending.pop(self.chance.randrange(len(self._pending)))
                self._now += self.chance.choice((0.0, 0.01, 1.0))
                return self._answer(forward)
            return Scored(10**6, (self._dist(),)) if self.chance.random() < 0.05 else None
        if draw < 0.4 + MESSAGES[self.kind]:
            return Received(self._message(), self._now)
        if draw < 0.97:
            self._now += 1.0
            return TimerFired(self._now, self.chance.choice((None, 0.01, 0.5)), silence=self.chance.choice((0.0, 9.0)))
        if draw < 0.977:
            return LinkLost()
        if draw < 0.995:
            return LinkBack() if self.front else None
        return Cancelled() if draw < 0.9955 else None

    def _deliver(self, event: Event) -> None:
        self.log.append(event)
        match event:
            case LinkLost():
                self._linked = False
            case LinkBack():
                self._linked = self.config.seat.joined or self._strategy.needs_peer
        effects = list(self.machine.on(event))
        self.effects += effects
        for effect in effects:
            assert not self.finished, "an effect after Finish"
            self._check(effect)

    def _check(self, effect: Effect) -> None:
        match effect:
            case Forward():
                self._forward(effect)
            case Prune(seq, keep, live):
                self._ledger.prune(seq, keep, live)  # raises for what no engine can do
            case Emit(token):
                assert self.front and len(self.known) < self.config.output.max_tokens
                needs_peer = self._strategy.needs_peer and self._strategy.text_of != self.config.seat.side
                assert self._linked or not (self.config.seat.awaited and needs_peer), "it does not wait"
                self.known.append(token)
                self._at = len(self.known)
            case OpenPeer(targets, epoch):
                assert list(targets) == self.known, "the peer is not opened with what was emitted"
                self._epoch = epoch
            case Send(message):
                self._sent(message)
            case Finish():
                self.finished = True

    def _forward(self, forward: Forward) -> None:
        for segment in (forward.segment, *forward.others):
            # raises unless it continues exactly what is written
            self._ledger.written(self._ledger.place(Batch((segment,))))
        self._pending.append(forward)

    def _answer(self, forward: Forward) -> Event:
        branches = [
            tuple(self._dist() for _ in segment.logits_rows()) for segment in (forward.segment, *forward.others)
        ]
        if forward.sampling is None:
            return Scored(forward.ticket, branches[0], self._now)
        if forward.mixture is not None:
            rows = sample_mixed_rows(branches, forward.sampling, forward.mixture)
        else:
            rows = tuple(sample_row(dist, row) for dist, row in zip(branches[0], forward.sampling, strict=True))
        return Sampled(forward.ticket, rows, self._now)

    def _sent(self, message: SessionMessage) -> None:
        assert decode(encode(message), vocab_size=VOCAB) == message, "it sends what a peer would refuse"
        self._epoch = message.epoch
        match message:
            case Targets():
                assert message.start <= len(self.known) or not self.front
                if self.front:  # all that was emitted, and then perhaps the end
                    emitted = [*self.known, *EOS]  # an end is a target, and is not emitted
                    named = zip(message.tokens, message.sources or bytes(len(message.tokens)), strict=True)
                    told = [emitted[at] if source else token for at, (token, source) in enumerate(named, message.start)]
                    targets = [*self.known[: message.start], *told]
                    assert targets == self.known or (targets[:-1] == self.known and targets[-1] in EOS), "retracted"
                self._at = message.start + len(message.tokens)
            case SyncState():
                self._at = message.targets
            case Handover():
                self._turn = message.turn
            case Drafts():
                nodes = unpack_nodes(message.nodes, VOCAB)
                self._own_nodes += range(nodes.first, nodes.first + len(nodes.tokens))
            case _:
                pass
        self._private(message)

    def _private(self, message: SessionMessage) -> None:
        """A device sends nothing that is computed from private documents but choices, whatever it is asked for."""
        if self.config.seat.side == "device" and self.config.seat.private:
            if self.options.aggregator != "coin" or self.options.rescoring:
                assert not isinstance(message, EvidenceWeight | SpeedReport | Handover), message
            if isinstance(message, Drafts):
                assert self.front and not message.dists
                self._choices(unpack_nodes(message.nodes, VOCAB))
            if isinstance(message, Targets) and self.front:
                assert not message.lanes

    def _choices(self, nodes: EncodedNodes) -> None:
        """One after a prefix: a node follows a choice of this side, a token of its peer, or the target that both make,
        and reveals no other."""
        assert nodes.choices is not None and nodes.scores is None
        decides = self.options.aggregator != "coin" or self.options.rescoring
        for number, (parent, edge, choice) in enumerate(
            zip(nodes.parents, nodes.tokens, nodes.choices, strict=True), nodes.first
        ):
            if parent >= 0 and edge not in (FOLLOWS, YOURS, self._chosen[parent]):
                others = self._shown.setdefault(parent, set())
                others.add(edge)
                assert edge in self._peer_tokens or (decides and len(others) == 1), "a guess"
            self._chosen[number] = choice

    # ---- random events ----------------------------------------------------------------------------------------------
    def _dist(self) -> Dist:
        if self.chance.random() < 0.7:
            probs = np.full(VOCAB, 1e-5)
            probs[self.chance.choice((LIKELY, LIKELY, LIKELY, VOCAB - 1))] = 1.0
        else:
            probs = np.zeros(VOCAB)
            for token in self.chance.sample(range(VOCAB), self.chance.choice((1, 3, VOCAB))):
                probs[token] = self.chance.random() ** 4 + 1e-9
        return Dist.dense(probs / probs.sum())

    def _retrieved(self) -> Retrieved:
        scored = self.chance.random() < 0.6
        branches = tuple(
            Branch(self._prompt(), self.chance.random() if scored else None) for _ in range(self.chance.choice((1, 2)))
        )
        return Retrieved(branches, self.chance.choice((None, None, 20, 6)))

    def _prompt(self) -> tuple[int, ...]:
        """Text in which tokens follow the likely token."""
        text = tuple(self.chance.choice((LIKELY, *SECRET)) for _ in range(self.chance.randrange(1, 12)))
        return text * self.chance.choice((1, 2))

    def _any(self) -> int:
        return self.chance.choice((0, self.chance.randrange(4), self.chance.randrange(30), 2**31 - 300))

    def _token(self) -> int:
        return LIKELY if self.chance.random() < 0.8 else self.chance.choice((self.chance.randrange(VOCAB), 2**31 - 1))

    def _message(self) -> SessionMessage:
        chance = self.chance
        near = 0.7 if self.kind == "hostile" else 0.95
        epoch = self._epoch if chance.random() < near else self._any()
        start = max(0, self._at + chance.choice((0, 0, 0, -2, -1, 1, 5))) if chance.random() < near else self._any()
        tokens = [self._token() for _ in range(chance.randrange(5))]
        match chance.choice("dddddwttthhmpp" if self._peer_nodes else "dwwt"):
            case "d":
                return self._drafts(epoch, start)
            case "w":
                return EvidenceWeight(0, epoch, chance.choice((None, 0.3, 0.0, 5.0, -5.0, 700.0, 1e308, -1e308)))
            case "t":
                if start == self._at and not self.front:
                    self._at += len(tokens)  # as it will send itself, sooner or later
                num_lanes = len(tokens) if chance.random() < 0.9 else 0
                return Targets(0, epoch, start, tokens, bytes(chance.randrange(3) for _ in range(num_lanes)))
            case "h" if chance.random() < 0.6:
                self._turn = self._turn + 1 if chance.random() < near else self._any()
                return Handover(0, epoch, self._turn, start)
            case "h":
                return SyncState(
                    0, epoch, self._turn if chance.random() < near else self._any(), start, chance.random() < 0.5
                )
            case "m":
                node = chance.choice(self._own_nodes) if self._own_nodes and chance.random() < near else self._any()
                return DetailRequest(0, epoch, node, chance.choice((1, 2)))
            case _:
                return SpeedReport(
                    0, epoch, chance.choice((0.0, 1e-9, 0.05, 3600.0)), chance.choice((0.0, 0.01, 3600.0))
                )

    def _drafts(self, epoch: int, start: int) -> Drafts:
        """A few nodes: on a decided prefix, on nodes sent before, or on nothing."""
        chance = self.chance
        first = (self._peer_nodes[-1][0] + 1 if self._peer_nodes else 0) if chance.random() < 0.9 else self._any()
        count = chance.choice((1, 1, 2, 3, 6))
        old = [(name, position) for name, position in self._peer_nodes if name < first]
        anchored = not old or chance.random() < 0.5
        wide = chance.random() < 0.5
        parents, edges = [], []
        for number in range(first, first + count):
            if number == first and anchored:
                parents.append(-1)
                edges.append(0)
                continue
            before = [name for name, _ in old[-8:]] + list(range(first, number))
            parent = chance.choice(before) if wide and before else max(0, number - 1)
            parents.append(parent)
            edges.append(YOURS if chance.random() < 0.1 else self._token() % VOCAB)
        coin = self.options.aggregator == "coin" if chance.random() < 0.95 else chance.random() < 0.5
        drawn = tuple(YOURS if chance.random() < 0.1 else self._token() % VOCAB for _ in range(count))
        choices = drawn if coin else None
        self._peer_tokens.update(choices or ())
        if coin:
            edges = [
                FOLLOWS if 0 <= parent < first and chance.random() < 0.5 else edge
                for parent, edge in zip(parents, edges, strict=True)
            ]
        level = chance.choice((0, 0, 0, 1, 2))
        level = 0 if coin and chance.random() < 0.95 else level
        scored = self.options.rescoring and chance.random() < 0.9
        scores = tuple(chance.randrange(-999, 999) for _ in range(count)) if scored else None
        nodes = EncodedNodes(start if anchored else None, level, first, tuple(parents), tuple(edges), choices, scores)
        self._peer_nodes += [(number, start) for number in range(first, first + count)]
        try:
            packed = pack_nodes(nodes)
        except ValueError:  # this one is no tree: the codec would refuse it before any machine sees it
            return Drafts(0, epoch, b"\x00" if chance.random() < 0.5 else b"", [])
        return Drafts(0, epoch, packed, [] if coin else self._dists(count, level))

    def _dists(self, count: int, level: int) -> list[DistPayload]:
        chance = self.chance
        if chance.random() < 0.03:
            return [DistPayload(b"\x41", b"\x00")] * count
        empty = DistPayload(b"", b"")
        return [empty if chance.random() < 0.1 else encode_head(self._dist(), precise=level > 0) for _ in range(count)]


def test_no_order_of_events_and_no_message_breaks_a_machine() -> None:
    did: Counter[str] = Counter()
    for seed in range(NUM_RUNS):
        run = Run(seed, KINDS[seed % 3])
        try:
            run.play()
        except Exception as error:
            error.add_note(f"seed {seed}, after {run.log[-3:]}")
            raise
        did.update(type(effect).__name__ for effect in run.effects)
        did.update(type(effect.message).__name__ for effect in run.effects if isinstance(effect, Send))
        did["whole answers"] += any(e.reason in ("stop", "length") for e in run.effects if isinstance(e, Finish))
    # That much happened: otherwise nothing was tried.
    wanted = ("Emit", "Forward", "Prune", "OpenPeer", "PassOver", "whole answers")
    sent = ("Drafts", "EvidenceWeight", "DetailRequest", "Targets", "Handover", "SpeedReport", "SyncState")
    assert min(did[kind] for kind in wanted) > 40 and min(did[kind] for kind in sent) > 2, did
