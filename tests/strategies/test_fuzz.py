"""Whatever comes in whatever order: no machine raises, retracts, forgets its rows or acts after its end.

Messages are random but of the right shape, aimed near where the machine is, so that many of them matter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.core.dist import Dist
from paceline.core.sampling import SamplingParams
from paceline.core.segments import SeqId
from paceline.strategies.aggregate import law
from paceline.strategies.machine import (
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
    Open,
    Received,
    Retrieved,
    Scored,
    Send,
    Started,
    Task,
    Truncate,
    Woke,
)
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, encode
from paceline.wire.messages import DistPayload, DraftTokens, Have, SessionMessage, Targets
from paceline.wire.payload import encode_dist
from tests.strategies.cases import EOS, VOCAB

NUM_RUNS = 1200
KINDS = ("quiet", "busy", "hostile")
MESSAGES = {"quiet": 0.02, "busy": 0.2, "hostile": 0.3}  # share of the events
LIKELY = 65  # a token that both sides mostly say, so that answers get somewhere
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=9, frequency_penalty=1.0, presence_penalty=0.5, seed=2),
)


class Run:
    """One machine under random events: what it did, and what must hold of it."""

    def __init__(self, seed: int, kind: str) -> None:
        self.chance = chance = random.Random(f"{kind} {seed}")
        self.kind = kind
        side, self.front = chance.choice(SIDES), chance.random() < 0.6
        strategy = STRATEGIES[chance.choice(sorted(STRATEGIES))] if self.front else STRATEGIES["aggregate"]
        self.task = Task(
            side=side,
            front=self.front,
            sampling=chance.choice(SAMPLINGS),
            max_tokens=chance.choice((1, 2, 12)),
            eos_ids=EOS,
            vocab_size=VOCAB,
            targets=() if self.front else tuple(chance.randrange(VOCAB - 1) for _ in range(chance.choice((0, 0, 3)))),
            epoch=0 if self.front else chance.choice((0, 0, 5)),
            linked=strategy.needs_peer and chance.random() < 0.9,
        )
        self.machine = strategy.machine(self.task)
        self.log: list[Event] = []
        self.effects: list[Effect] = []
        self.known = list(self.task.targets)  # what has been emitted
        self.finished = False
        self._epoch, self._at = self.task.epoch, len(self.task.targets)  # as the machine told its peer last
        self._rows: Counter[SeqId] = Counter()
        self._pending: list[tuple[int, SeqId, int]] = []  # ticket, sequence, its rows then
        self._void: list[int] = []
        self._now = 0.0

    def play(self) -> None:
        chance = self.chance
        if chance.random() < 0.1:
            self._tell(LinkLost())
            self._tell(LinkBack())
        self._tell(Started(0.0))
        searched = False
        for _ in range(chance.randrange(5, 120)):
            if not searched and chance.random() < 0.2:
                searched = True
                self._tell(self._retrieved())
            elif (event := self._event()) is not None:
                self._tell(event)

    def _event(self) -> Event | None:
        draw = self.chance.random()
        if draw < 0.5:
            if self._pending:
                ticket, _, _ = self._pending.pop(self.chance.randrange(len(self._pending)))
                return Scored(ticket, (self._dist(),))
            return Scored(self._void.pop(), (self._dist(),)) if self._void else None
        if draw < 0.5 + MESSAGES[self.kind]:
            return Received(self._message())
        if draw < 0.9:
            self._now += 1.0
            return Woke(self._now)
        if draw < 0.92:
            return LinkLost()
        if draw < 0.96:
            return LinkBack() if self.front else None
        return Cancelled() if draw < 0.961 else None

    def _tell(self, event: Event) -> None:
        self.log.append(event)
        effects = list(self.machine.on(event))
        self.effects += effects
        for effect in effects:
            assert not self.finished, "an effect after Finish"
            self._check(effect)

    def _check(self, effect: Effect) -> None:
        match effect:
            case Forward(ticket, segment):
                assert segment.start == self._rows[segment.seq] and max(segment.tokens) < VOCAB
                self._rows[segment.seq] += len(segment.tokens)
                self._pending.append((ticket, segment.seq, self._rows[segment.seq]))
            case Truncate(seq, length):
                self._rows[seq] = min(self._rows[seq], length)
                void = [item for item in self._pending if item[1] == seq and item[2] > length]
                self._pending = [item for item in self._pending if item not in void]
                self._void += [ticket for ticket, _, _ in void]
            case Emit(token):
                assert self.front and len(self.known) < self.task.max_tokens
                self.known.append(token)
                self._at = len(self.known)
            case Open(targets, epoch):
                assert list(targets) == self.known, "what was emitted is not what the peer is told"
                self._epoch = epoch
            case Send(message):
                self._sent(message)
            case Finish():
                self.finished = True

    def _sent(self, message: SessionMessage) -> None:
        assert decode(encode(message), vocab_size=VOCAB) == message, "it sends what a peer would refuse"
        self._epoch = message.epoch
        match message:
            case Targets():
                assert message.start <= len(self.known) or not self.front
                if self.front:  # all that was emitted, and then perhaps the end
                    told = [*self.known[: message.start], *message.tokens]
                    assert told == self.known or (told[:-1] == self.known and told[-1] in EOS), "retracted"
                self._at = message.start + len(message.tokens)
            case Have():
                self._at = message.targets

    # ---- what may come ----------------------------------------------------------------------------------------------
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
            Branch(tuple(range(1, self.chance.randrange(2, 5))), self.chance.random() if scored else None)
            for _ in range(self.chance.choice((1, 2)))
        )
        return Retrieved(branches, self.chance.choice((None, None, 20, 6)))

    def _any(self) -> int:
        return self.chance.choice((0, self.chance.randrange(4), self.chance.randrange(30), 2**31 - 300))

    def _token(self) -> int:
        return LIKELY if self.chance.random() < 0.8 else self.chance.choice((self.chance.randrange(VOCAB), 2**31 - 1))

    def _message(self) -> SessionMessage:
        chance = self.chance
        near = 0.7 if self.kind == "hostile" else 0.9
        epoch = self._epoch + (chance.random() < 0.1) if chance.random() < near else self._any()
        start = max(0, self._at + chance.choice((0, 0, 0, -2, -1, 1, 5))) if chance.random() < near else self._any()
        tokens = [self._token() for _ in range(chance.randrange(5))]
        match chance.randrange(3):
            case 0:
                weight = chance.choice((None, 0.3, -5.0, 700.0, 1e308, -1e308))
                return DraftTokens(0, epoch, start, tokens, self._payloads(tokens), weight)
            case 1:
                if start == self._at and not self.front:
                    self._at += len(tokens)  # as it will say itself, sooner or later
                num_lanes = len(tokens) if chance.random() < 0.9 else self._any() % 7
                return Targets(0, epoch, start, tokens, bytes(chance.randrange(3) for _ in range(num_lanes)))
            case _:
                return Have(0, epoch, self._any(), self._any())

    def _payloads(self, tokens: Sequence[int]) -> list[DistPayload]:
        if self.chance.random() < 0.1:
            return []
        empty = DistPayload(b"", b"")
        return [empty if self.chance.random() < 0.1 else encode_dist(law(self._dist())) for _ in tokens]


def comparable(effects: Sequence[Effect]) -> list[object]:
    """Distributions compare by identity; their bytes do not."""
    return [
        (effect.token, effect.lane, None if effect.dist is None else effect.dist.probs.tobytes())
        if isinstance(effect, Emit)
        else effect
        for effect in effects
    ]


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
        did["whole answers"] += any(e.reason in ("stop", "length") for e in run.effects if isinstance(e, Finish))
    # That much happened: otherwise nothing was tried.
    wanted = ("Emit", "Forward", "Truncate", "Send", "Open", "Drop", "whole answers")
    assert min(did[kind] for kind in wanted) > 50, did


def test_the_same_events_give_the_same_effects() -> None:
    for seed in range(100):
        run = Run(seed, KINDS[seed % 3])
        run.play()
        again = type(run.machine)(run.task)  # type: ignore[call-arg]  # a machine is made of its task
        effects = [effect for event in run.log for effect in again.on(event)]
        assert comparable(effects) == comparable(run.effects), f"seed {seed}"
