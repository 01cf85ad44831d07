"""Drafting: the chain grows as far as distributions are known or tables and the text suggest a token, in steps that are
sent whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from paceline.core.clock import MovingAverage, StepClock
from paceline.core.sampling.dist import Dist
from paceline.strategies.base import Effect, MachineConfig, Send
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
from paceline.strategies.draft_verify.pace import Pace
from paceline.strategies.draft_verify.verifiers import Draft, options_of, verifier_of
from paceline.wire.payloads import encode_places
from paceline.wire.verify_messages import MAX_CHAIN

# The drafter's chain: nodes below the head that it has drafted, and how many of them the verifier has been sent.


@dataclass(frozen=True, slots=True)
class Examined:
    """What became of a draft in whose place a target is known."""

    nats: float  # entropy of the distribution it was drawn from
    accepted: bool
    second: bool | None  # its second guess is the target; None: it was accepted, or had none


class Drafted(NamedTuple):
    """A draft of the chain."""

    node: PrefixNode
    draft: Draft  # its token, with what is sent beside
    nats: float  # entropy of the distribution that it was drawn from


@dataclass(slots=True)
class Chain:
    """`base` targets, then what has been sent of the chain, of which `passed` are targets by now."""

    base: int
    drafted: list[Drafted] = field(default_factory=list)  # below the head, waiting for a verdict or for being sent
    passed: int = 0
    sent: int = 0  # tokens of this base

    @property
    def unsent(self) -> list[Draft]:
        return [each.draft for each in self.drafted[max(0, self.sent - self.passed) :]]

    @property
    def full(self) -> bool:
        """No more tokens can be sent below this base."""
        return self.passed + len(self.drafted) >= MAX_CHAIN

    def advance(self, head: PrefixNode) -> Examined | None:
        """The next target: the node that is the head now. Returns what became of the draft in its place; None where
        there was no draft.

        Below a target that was not drafted, or not sent in time, another chain begins.
        """
        if not self.drafted:
            self.restart(head.position)
            return None
        node, draft, nats = self.drafted[0]
        if node is not head:
            self.restart(head.position)
            return Examined(nats, False, None if draft.second is None else draft.second == head.token)
        del self.drafted[0]
        self.passed += 1
        if self.sent < self.passed:  # the verifier got there by itself
            self.resend(head.position)
        return Examined(nats, True, None)

    def resend(self, base: int) -> None:
        """All that is below so many targets is to be sent again, as another chain."""
        self.base, self.passed, self.sent = base, 0, 0

    def restart(self, base: int) -> None:
        """Forget the chain; the next one hangs below so many targets."""
        self.resend(base)
        self.drafted.clear()


MAX_LOOKED_UP: Final = 16  # drafts in a row without a forward
LEAST_LOOKED_UP: Final = 0.5  # probability of being accepted
MAX_DRAFTS: Final = 32  # of one message: their distributions must fit a frame
_HEADER_BYTES: Final = 4  # of a message of drafts, beside the tokens


@dataclass(slots=True)
class DraftCounts:
    """Of one answer, for its stats."""

    drafted: int = 0
    examined: int = 0  # in whose place a target is known
    accepted: int = 0
    looked_up: int = 0  # of the drafted ones: from tables and the text, without a forward
    second_accepted: int = 0  # second guesses that were the target in place of their draft


class Departures:
    """When drafts must leave to be there as a verifier that does not wait begins its next forward.

    It begins one as soon as it has sent a verdict, so every mean gap between verdicts.
    """

    def __init__(self) -> None:
        self._gap = MovingAverage(0.2)  # s
        self._last: float | None = None  # when a verdict came
        self._left = -math.inf  # when drafts left for a forward

    def verdict_came(self, now: float) -> None:
        if self._last is not None and now > self._last:
            self._gap.add(now - self._last)
        self._last = now

    def is_due(self, now: float, draft_s: float, rtt: float) -> bool:
        """What is drafted must leave now: the next draft, after `draft_s`, would come too late for some forward."""
        gap = self._gap.value
        if gap is None or self._last is None or gap <= 0.0:
            return False
        first = self._last - rtt  # a verdict was sent half a round trip ago, and drafts take another half
        departure = first + math.floor((now + draft_s - first) / gap) * gap  # the last one before the next draft
        if departure < now or departure <= self._left:
            return False
        self._left = departure
        return True


class Drafting:
    """The chain under one epoch."""

    def __init__(
        self,
        config: MachineConfig,
        epoch: int,
        num_targets: int,
        tree: PrefixTree,
        decoder: BranchDecoder,
        pace: Pace,
        timing: StepClock,
        counts: DraftCounts,
        ngrams: NgramDrafts | None = None,
    ) -> None:
        """ngrams: where their best draft is likely enough, the chain goes on with it, and no forward is computed."""
        self._config, self._epoch = config, epoch
        options = options_of(config)
        self._waits, self._second_guesses = options.waits, options.second_guesses
        self._tree, self._decoder, self._pace, self._timing = tree, decoder, pace, timing
        self._ngrams = ngrams
        self._verifier = verifier_of(config)
        self._chain = Chain(num_targets)
        self._recovered: tuple[int, int] | None = None  # the target this side has drawn last: its position, the token
        self._paused = False  # nothing more is drafted until the next verdict
        self._idle = False  # the cloud, which waits for drafts, knows that there are none: it decodes until some come
        self._late = False  # the chain began while the cloud decoded: its drafts come too late to be examined
        self._looked_at: PrefixNode | None = None  # what this side would have drafted there is compared, not sent
        self._sent_at: float | None = None  # when the drafts that wait for a verdict were sent
        self._departures = Departures()
        self._counts = counts
        self._came = 0  # targets of the present verdict

    def moved(self, head: PrefixNode) -> None:
        """The tree's head has moved to the next target, and the chain does with it, or ends."""
        self._came += 1
        examined = self._chain.advance(head)
        self._paused = False
        if examined is None:
            self._late = False
            if not self._pace.empty:
                self._pace.cancel()
            return
        self._counts.examined += 1
        self._counts.accepted += examined.accepted
        self._counts.second_accepted += examined.second is True
        if not self._late:
            self._pace.examined(examined.nats, accepted=examined.accepted, second=examined.second)
        if not examined.accepted:
            self._late = False
            self._pace.cancel()

    def compare(self, token: int) -> None:
        """Learn whether a draft in the place of the next target would have been accepted, where it was looked at."""
        head, looked_at, self._looked_at = self._tree.head, self._looked_at, None
        if looked_at is head and head.own_dist is not None:
            would_draft = head.own_dist.token(self._config.output.sampling, head.position)
            self._pace.examined(head.own_dist.known.entropy(), accepted=would_draft == token)

    def recover(self, head: Dist) -> int:
        """The next target, which the cloud has left to this side. See `Verifier.recover`."""
        node = self._tree.head
        token = self._verifier.recover(node.own_dist, head, node.position)
        self._recovered = node.position, token
        return token

    def verdict_came(self, now: float, rtt: float | None) -> None:
        """Record how long the drafts that were sent first have waited. Where the cloud waits for them, a verdict that
        comes sooner than a round trip is of an earlier forward."""
        self._departures.verdict_came(now)
        self._pace.came(now, self._came, streamed=self._idle)
        self._came = 0
        if self._sent_at is not None and not (self._waits and now - self._sent_at < (rtt or 0.0)):
            self._pace.stats.estimates.verified.add(max(0.0, now - self._sent_at))
            self._sent_at = None

    def resend(self, now: float) -> list[Effect]:
        """Send all drafts again: they may be lost. Not in the middle of a step."""
        if self._pace.open:
            return []
        self._chain.resend(self._tree.head.position)
        return self._send(now, last=self._waits and self._paused)

    def draft(self, now: float, bandwidth: float | None, rtt: float | None) -> list[Effect]:
        """Extend the chain as far as distributions are known, send complete steps, and ask for the next row."""
        effects: list[Effect] = []
        chain = self._chain
        while not self._paused:
            last = chain.drafted[-1].node if chain.drafted else self._tree.head
            if not self._pace.open:
                if not self._begin_step(last, bandwidth, rtt):
                    return [*effects, *self._pause(now), *self._look(now)]
                effects += self._send(now)
            if last.own_dist is None:
                looked_up = self._look_up(last)
                if looked_up is None:
                    return [*effects, *forward_to(last, self._decoder, self._tree.head, now)]
                suggested, nats = looked_up
                draft = suggested if self._pace.admits(nats) else None
                self._counts.looked_up += draft is not None
            else:
                own, nats, draft = last.own_dist, last.own_dist.known.entropy(), None
                if self._pace.admits(nats):  # only then: asking counts places
                    draft = self._verifier.draft(own, last.position, second=self._guesses_twice)
            is_end = draft is not None and draft.token in self._config.output.eos_ids
            if draft is None or (is_end and not self._verifier.drafts_ends):
                if draft is not None:
                    self._pace.withdraw()
                self._pace.end(self._step_bytes(), bandwidth)
                return [*effects, *self._pause(now)]
            chain.drafted.append(Drafted(last.child(draft.token), draft, nats))
            self._counts.drafted += 1
            if self._pace.complete or not self._has_room(chain.drafted[-1].node):
                self._pace.end(self._step_bytes(), bandwidth)
                if not self._waits:
                    effects += self._send(now)  # else with the word whether more follow
            elif not self._waits and self._departures.is_due(now, self._timing.at(1), rtt or 0.0):
                effects += self._send(now)
        return effects

    @property
    def _guesses_twice(self) -> bool:
        return self._second_guesses and self._pace.stats.seconds.pays()

    def _look_up(self, last: PrefixNode) -> tuple[Draft, float] | None:
        """A draft below this node from tables and the text, where it is as likely to be accepted as the draft model's,
        with the entropy of a draft of that model that is as likely. None: compute the model's.

        Rows of such drafts are computed with the next draft of the model's, so there may not be too many of them.
        """
        head, decoder = self._tree.head, self._decoder
        if self._ngrams is None or last.cached:
            return None  # the model's draft is under way
        rows = _without_row(last, head)
        if len(rows) >= MAX_LOOKED_UP or not decoder.spare_rows([*decoder.missing_rows(head), *rows]):
            return None
        children = self._ngrams.children(last, head)
        if not children or children[0][0] in self._config.output.eos_ids:
            return None
        token, prob = children[0]
        if prob < LEAST_LOOKED_UP or prob < self._pace.stats.estimates.rho:
            return None
        second = children[1][0] if len(children) > 1 and self._guesses_twice else None
        return Draft(token, second=second), self._pace.nats_of(prob)

    def _begin_step(self, last: PrefixNode, bandwidth: float | None, rtt: float | None) -> bool:
        self._looked_at = None
        if not self._has_room(last):
            return False
        begins = self._pace.begin(len(self._chain.drafted), self._timing.at(1), bandwidth, rtt)
        self._looked_at = last if self._pace.looks else None
        return begins

    def _look(self, now: float) -> list[Effect]:
        """Compute what would have been drafted, where that is to be compared."""
        if self._looked_at is None or self._looked_at.own_dist is not None:
            return []
        return forward_to(self._looked_at, self._decoder, self._tree.head, now)

    def _has_room(self, last: PrefixNode) -> bool:
        """A token may be drafted behind this node."""
        length = last.position + 1
        if last is not self._tree.head and last.token in self._config.output.eos_ids:
            return False
        return not self._chain.full and length < self._config.output.max_tokens and self._decoder.fits(length)

    def _pause(self, now: float) -> list[Effect]:
        """Draft no more until the next verdict. A cloud that waits for drafts is told so."""
        self._paused = True
        told = self._idle and not self._chain.drafted and self._recovered_token is None
        return self._send(now, last=self._waits and not told)

    def _send(self, now: float, *, last: bool = False) -> list[Effect]:
        """Send what has been drafted and not sent. last: and that nothing follows until the next verdict."""
        chain, effects = self._chain, list[Effect]()
        recovered, drafts = self._recovered_token, chain.unsent
        if drafts or last:
            self._late = self._late or (self._idle and self._verifier.needs_drafts)
            self._idle = last and not (drafts or chain.sent)
        if drafts and self._sent_at is None:
            self._sent_at = now
        while drafts or last:
            part, drafts = drafts[:MAX_DRAFTS], drafts[MAX_DRAFTS:]
            ends = last and not drafts
            message = self._verifier.message(self._epoch, chain.base, chain.sent, part, last=ends, recovered=recovered)
            effects.append(Send(message))
            chain.sent += len(part)
            last = last and not ends
        return effects

    @property
    def _recovered_token(self) -> int | None:
        """The target before the chain's base, where this side has drawn it."""
        position, token = self._recovered or (None, None)
        return token if position == self._chain.base - 1 else None

    def _step_bytes(self) -> int:
        drafts = self._chain.unsent
        dists = sum(len(draft.drawn_from) for draft in drafts)
        places = encode_places([(draft.token, draft.second) for draft in drafts])
        return _HEADER_BYTES + dists + len(places) if drafts else 0


def forward_to(node: PrefixNode, decoder: BranchDecoder, head: PrefixNode, now: float) -> list[Effect]:
    """A forward of this node, and of the targets and drafts before it that have no row yet; nothing while one is under
    way."""
    if not decoder.idle:
        return []
    effects = decoder.commit_to(head)
    rows = decoder.missing_rows(head)
    rows = [*rows, *(each for each in _without_row(node, head) if each not in rows)]
    return [*effects, *decoder.append_rows(rows, head, now)] if rows else effects


def _without_row(node: PrefixNode, head: PrefixNode) -> list[PrefixNode]:
    """The nodes behind `head` up to this one whose rows are not in the cache, parents first; `head` itself where it is
    meant."""
    found: list[PrefixNode] = []
    each: PrefixNode | None = node
    while each is not None and not each.cached and (each is node or each.position > head.position):
        found.append(each)
        each = each.parent
    return found[::-1]
