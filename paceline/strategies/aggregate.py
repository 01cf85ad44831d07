"""`aggregate`: distributed RAG with speculative aggregation (DRAGON; specs 1.5, 1.6 mode C).

Each side continues its own documents and drafts ahead. The aggregator, always the device here, mixes both sides'
distributions and decides each target by common noise. So of what is private only the targets go up and, where the
cloud faces the client, whose documents each of them came from.

A target depends on the seed, the prefix and the two laws alone: never on drafts, timing or message order. A side's law
is its mixture cut to `LAW_TOP_P` and rounded as the wire rounds it, on both sides alike: the sender drafts from exactly
what it ships, and the text does not depend on which side decides. Mass left off belongs to no token.

Not handled: moving the aggregator, tree drafts, exactness beyond that cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.aggregation import mix_weighted, side_weights
from paceline.core.dist import Dist
from paceline.core.sampling import choose, truncate
from paceline.errors import RemoteProtocolError
from paceline.strategies.branches import Branches
from paceline.strategies.machine import (
    Cancelled,
    Drop,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    LinkBack,
    LinkLost,
    Open,
    Received,
    Retrieve,
    Retrieved,
    Scored,
    Send,
    Side,
    Started,
    Strategy,
    Task,
    WakeAt,
    Woke,
)
from paceline.wire.messages import DraftTokens, Have, SessionMessage, Targets
from paceline.wire.payload import decode_dist, encode_dist, quantise

AGGREGATOR: Side = "device"
MAX_DRAFT_AHEAD = 8  # tokens beyond the last target (specs 10); the paper has no bound
MAX_EARLY = 64  # messages of targets that wait for earlier ones, and tokens in each; the rest is asked for again
WAKE_INTERVAL = 1.0  # s without progress before saying what we have
PATIENCE = 8  # wakes without one message from a peer that takes part before going on alone
STALL = 60  # wakes without a target, this side being ready, before the same: the peer lives and does nothing
LAW_TOP_P, LAW_MAX_IDS = 0.999, 512  # what a side ships of a distribution; the rest belongs to no token
CLEAR = 2.0  # a token is one side's when that side thought it so many times as likely as the other did
LANES: tuple[Side | None, ...] = (None, "cloud", "device")  # by their number on the wire


def law(dist: Dist) -> Dist:
    """The part of a side's distribution that takes part in the mixture, as the wire would carry it."""
    return quantise(dist, top_p=LAW_TOP_P, max_ids=LAW_MAX_IDS)


def deciding_side(token: int, laws: Mapping[Side, Dist]) -> Side | None:
    """Whose documents a target came from: None where both sides would have said much the same."""
    probs = {side: dist.prob(token) for side, dist in laws.items()}
    best = max(probs, key=lambda side: probs[side])
    rest = max((prob for side, prob in probs.items() if side != best), default=0.0)
    return best if probs[best] >= CLEAR * rest else None


class Aggregate:
    """One side. Three conditions: it decides (`AGGREGATOR` with a peer), follows (the other with a peer), is alone."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._branches = Branches(task.sampling, task.vocab_size)
        self._targets = list(task.targets)
        self._lanes = [0] * len(task.targets)
        self._epoch = task.epoch  # rollbacks of the side that follows
        self._linked = task.linked
        self._agreed = 0  # this many of the fed tokens are known to be targets
        self._ended = False  # all targets are known
        self._finished = False
        self._progress = False  # since the last wake
        self._silent_wakes = 0
        self._idle_wakes = 0
        self._started = False
        self._stats = {"drafted": 0.0, "accepted": 0.0, "alone": 0.0}
        # of the side that decides
        self._held: dict[int, tuple[int, Dist]] = {}  # position -> the peer's draft and its law
        self._peer_log_h: float | None = None
        self._peer_known = False  # `_peer_log_h` has come
        self._told = len(self._targets)  # targets the peer has been sent
        # of the side that follows
        self._drafts: dict[int, tuple[int, Dist]] = {}  # position -> own draft under this epoch and its law
        self._early: dict[int, Targets] = {}  # targets that came before the ones they follow

    # ---- events -----------------------------------------------------------------------------------------------------
    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started(now):
                self._started = True
                opening = [Open(tuple(self._targets), self._epoch)] if self._task.front and self._linked else []
                return [Retrieve(), *opening, WakeAt(now + WAKE_INTERVAL)]
            case Retrieved(branches, room):
                return self._branches.start(branches, self._targets, room) + self._advance()
            case Scored(ticket, dists):
                self._branches.scored(ticket, dists)
                return self._advance()
            case Received(message):
                self._silent_wakes = 0
                return self._received(message) if self._linked else []
            case Woke(now):
                return [*self._woke(), WakeAt(now + WAKE_INTERVAL)]
            case LinkLost():
                return self._lost()
            case LinkBack():
                return self._back()
            case Cancelled(reason):
                return [self._finish(reason)]

    def _received(self, message: SessionMessage) -> list[Effect]:
        match message:
            case DraftTokens() if self._decides:
                self._hold(message)
            case Targets() if not self._decides:
                return self._follow(message)
            case Have():
                return self._resend(message)
        return self._advance()

    def _woke(self) -> list[Effect]:
        """Nothing came or went for a while: say what is here, so that the peer can send again what was lost."""
        if not self._linked or self._progress:
            self._progress = False
            return []
        self._silent_wakes += 1
        self._idle_wakes += self._branches.started and not self._branches.busy
        if self._task.front and (self._silent_wakes >= PATIENCE or self._idle_wakes >= STALL):
            return [Drop()]
        return [Send(Have(0, self._epoch, len(self._targets), self._held_until()))]

    def _lost(self) -> list[Effect]:
        if not self._task.front:
            return [self._finish("cancelled")]
        self._linked = False
        self._held.clear()
        self._drafts.clear()
        self._early.clear()
        return self._advance()

    def _back(self) -> list[Effect]:
        """Take the peer in again from the last target on; until it answers, nothing is decided."""
        if self._linked or not self._task.front:
            return []
        self._linked, self._peer_known, self._silent_wakes, self._idle_wakes = True, False, 0, 0
        if not self._started:
            return []  # `Started` will open the session
        self._epoch += 1
        self._told = len(self._targets)
        return [Open(tuple(self._targets), self._epoch), *self._advance()]

    # ---- both -------------------------------------------------------------------------------------------------------
    @property
    def _decides(self) -> bool:
        return self._task.side == AGGREGATOR

    def _advance(self) -> list[Effect]:
        """Do all that can be done with what is known."""
        effects: list[Effect] = []
        while not self._ended and (decided := self._decide()) is not None:
            # At once, target by target: what this side computed after a draft that did not stand must not be mixed in.
            effects += decided + self._catch_up()
        effects += self._tell()
        if self._ended:
            return effects + self._end()
        if not (self._task.front or self._branches.fits(len(self._targets))):
            return [*effects, self._finish("length")]  # this side's context has ended, the answer has not
        return effects + self._catch_up() + self._draft()

    def _decide(self) -> list[Effect] | None:
        if not self._linked:
            return self._decide_alone()
        return self._decide_together() if self._decides else None

    def _decide_alone(self) -> list[Effect] | None:
        dist = self._branches.dist(len(self._targets))
        if dist is None:
            return None
        self._stats["alone"] += 1
        final = truncate(dist, self._task.sampling)
        lane = 0 if self._branches.log_h is None else LANES.index(self._task.side)
        return self._target(choose(final, self._task.sampling, len(self._targets)), lane, final)

    def _target(self, token: int, lane: int, final: Dist | None) -> list[Effect]:
        """The next target is known: keep it, and let the client have it if this side faces one."""
        self._progress, self._idle_wakes = True, 0
        self._targets.append(token)
        self._lanes.append(lane)
        self._branches.forget(len(self._targets))
        stops = token in self._task.eos_ids
        self._ended = stops or len(self._targets) >= self._task.max_tokens
        return [Emit(token, final, LANES[lane])] if self._task.front and not stops else []

    def _catch_up(self) -> list[Effect]:
        """Bring the sequences to the targets: roll back drafts that did not stand, feed what is missing."""
        fed = self._branches.fed
        both = min(len(fed), len(self._targets))
        self._agreed = min(self._agreed, both)
        while self._agreed < both and fed[self._agreed] == self._targets[self._agreed]:
            self._agreed += 1
        effects = self._branches.rollback(self._agreed) if self._agreed < both else []
        if not self._branches.busy:
            effects += self._branches.feed(self._targets[len(self._branches.fed) :])
        return effects

    def _draft(self) -> list[Effect]:
        """Draft one token ahead, if its distribution is here, and feed it as if it were accepted."""
        position = len(self._branches.fed)
        dist = self._branches.dist(position)
        ahead = position - len(self._targets)
        if not self._linked or dist is None or position in self._drafts or ahead < 0:
            return []
        if ahead >= MAX_DRAFT_AHEAD or position >= self._task.max_tokens:
            return []
        shipped = law(dist)
        token = choose(truncate(shipped, self._task.sampling), self._task.sampling, position)
        effects: list[Effect] = []
        if not self._decides:
            self._drafts[position] = token, shipped
            effects.append(Send(self._draft_message(position)))
        if token in self._task.eos_ids or not self._branches.fits(position + 1):
            return effects  # what would follow the end is not worth drafting
        return effects + self._branches.feed([token])

    def _end(self) -> list[Effect]:
        """All targets are known. The side that faces the client finishes; the other waits to be closed."""
        if not self._task.front:
            return []
        stopped = self._targets[-1] in self._task.eos_ids if self._targets else False
        return [self._finish("stop" if stopped else "length")]

    def _finish(self, reason: FinishReason) -> Finish:
        self._finished = True
        return Finish(reason, dict(self._stats))

    def _resend(self, have: Have) -> list[Effect]:
        if self._decides:
            if have.targets < len(self._targets) or have.epoch < self._epoch:
                return [Send(self._targets_message(min(have.targets, len(self._targets))))]
            return []
        if have.targets > len(self._targets):
            return [Send(Have(0, self._epoch, len(self._targets), 0))]
        if have.epoch != self._epoch:
            return []
        return [Send(self._draft_message(position)) for position in sorted(self._drafts) if position >= have.drafts]

    # ---- the side that decides --------------------------------------------------------------------------------------
    def _hold(self, message: DraftTokens) -> None:
        if message.epoch != self._epoch:
            return  # drafted on a prefix that has since been rejected
        try:
            dists = [decode_dist(payload, self._task.vocab_size) for payload in message.dists]
        except RemoteProtocolError:
            return  # as good as lost
        self._peer_log_h, self._peer_known = message.log_weight, True
        for position, (token, dist) in enumerate(zip(message.tokens, dists, strict=False), message.start):
            if len(dist.ids) and len(self._targets) <= position <= len(self._targets) + MAX_DRAFT_AHEAD:
                self._held[position] = token, dist

    def _decide_together(self) -> list[Effect] | None:
        """One target from the mixture over both sides (DRAGON eq. 4), as soon as every side with documents is heard."""
        if not self._peer_known or not self._branches.started:
            return None  # what a side has found is not known before it has searched
        position = len(self._targets)
        log_h: dict[Side, float | None] = {"cloud": self._peer_log_h, "device": self._branches.log_h}
        weights = side_weights(log_h)
        theirs, ours = self._held.get(position), self._branches.dist(position)
        if (weights["cloud"] > 0 and theirs is None) or (weights["device"] > 0 and ours is None):
            return None
        laws: dict[Side, Dist] = {}
        if weights["cloud"] > 0 and theirs is not None:
            laws["cloud"] = theirs[1]
        if weights["device"] > 0 and ours is not None:
            laws["device"] = law(ours)
        mixture = mix_weighted(list(laws.values()), [weights[side] for side in laws])
        final = truncate(mixture, self._task.sampling)
        token = choose(final, self._task.sampling, position)
        has_documents = any(value is not None for value in log_h.values())
        lane = LANES.index(deciding_side(token, laws)) if has_documents else 0
        self._held.pop(position, None)
        if theirs is not None:
            self._stats["drafted"] += 1
            self._stats["accepted"] += theirs[0] == token
            if theirs[0] != token:
                self._epoch += 1
                self._held.clear()
        return self._target(token, lane, final)

    def _held_until(self) -> int:
        position = len(self._targets)
        while position in self._held:
            position += 1
        return position

    def _tell(self) -> list[Effect]:
        if not (self._decides and self._linked) or self._told == len(self._targets):
            return []
        message = self._targets_message(self._told)
        self._told = len(self._targets)
        return [Send(message)]

    def _targets_message(self, start: int) -> Targets:
        lanes = bytes(len(self._targets) - start) if self._task.front else bytes(self._lanes[start:])
        return Targets(0, self._epoch, start, self._targets[start:], lanes)

    # ---- the side that follows --------------------------------------------------------------------------------------
    def _draft_message(self, position: int) -> DraftTokens:
        token, shipped = self._drafts[position]
        return DraftTokens(0, self._epoch, position, [token], [encode_dist(shipped)], self._branches.log_h)

    def _follow(self, message: Targets) -> list[Effect]:
        """Take the targets that are new; those that come too early wait for the ones they follow."""
        if (
            any(token >= self._task.vocab_size for token in message.tokens)
            or len(message.lanes) != len(message.tokens)
            or message.start + len(message.tokens) > self._task.max_tokens
        ):
            return []  # as good as lost
        waits = message.start > len(self._targets)
        too_many = len(self._early) >= MAX_EARLY or len(message.tokens) > MAX_EARLY
        if message.epoch >= self._epoch and not (waits and too_many):
            kept = self._early.get(message.start)
            if kept is None or len(kept.tokens) <= len(message.tokens):
                self._early[message.start] = message
        effects: list[Effect] = []
        while not self._ended and (ready := min(self._early, default=len(self._targets) + 1)) <= len(self._targets):
            effects += self._apply(self._early.pop(ready))
        return effects + self._advance()

    def _apply(self, message: Targets) -> list[Effect]:
        effects: list[Effect] = []
        fresh = slice(len(self._targets) - message.start, None)
        for token, lane in zip(message.tokens[fresh], message.lanes[fresh], strict=True):
            if self._ended:
                break
            draft = self._drafts.pop(len(self._targets), None)
            if draft is not None:
                self._stats["drafted"] += 1
                self._stats["accepted"] += draft[0] == token
                if draft[0] != token:
                    self._drafts.clear()
            effects += self._target(token, lane if lane < len(LANES) else 0, None)
        if message.epoch > self._epoch and message.start + len(message.tokens) >= len(self._targets):
            # Rejected, or taken in again: what was drafted beyond these targets counts no more.
            self._epoch = message.epoch
            self._drafts.clear()
            effects += self._branches.rollback(len(self._targets))
        return effects


aggregate = Strategy(
    name="aggregate",
    summary="device and cloud each read their own documents; their predictions are mixed token by token",
    machine=Aggregate,
    needs_peer=True,
    reference="mixture",
)
