"""The device's machine: drafts a chain with its own model, and takes its targets from the cloud's verdicts.

Drafts are the device's own samples with the common noise: where both models agree on a prefix, so do their tokens.
Without the cloud the front continues with its own model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side
from paceline.errors import RemoteProtocolError
from paceline.strategies.base import (
    Cancelled,
    ClosePeer,
    DraftModelLost,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    FromDraftModel,
    LinkBack,
    LinkLost,
    MachineConfig,
    OpenPeer,
    PassOver,
    Received,
    Retrieve,
    Retrieved,
    Sampled,
    Scored,
    Send,
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder, take_answer
from paceline.strategies.decoding.drafter_feed import NgramDrafts
from paceline.strategies.decoding.form import BROKEN_FORM, permits
from paceline.strategies.decoding.peer_watch import LISTEN_S, PeerWatch
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.draft_verify.drafting import DraftCounts, Drafting, forward_to
from paceline.strategies.draft_verify.options import options_of
from paceline.strategies.draft_verify.pace import Pace
from paceline.strategies.draft_verify.verifiers import verifier_of
from paceline.wire.dist_codec import decode_head
from paceline.wire.messages import DistPayload, SessionMessage
from paceline.wire.payloads import decode_tokens
from paceline.wire.verify_messages import Rejected, Verdict, VerdictRequest

# Verdicts that came before those they follow, until the gap before them is closed.


MAX_EARLY = 64  # verdicts that wait; the rest is asked for again
MAX_EARLY_BYTES = 1 << 18  # of all that wait, with their distributions; likewise


class EarlyVerdicts:
    """Bounded, since a peer may send any verdict it likes. Links keep the order, so of an honest one few wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, Verdict] = {}  # by their start
        self._bytes = 0

    def add(self, verdict: Verdict, num_targets: int) -> None:
        """Keep a verdict; of two with one start the one that says more. num_targets: known so far."""
        kept = self._waiting.get(verdict.start)
        if kept is not None and _says(kept) > _says(verdict):
            return
        freed = 0 if kept is None else _size(kept)
        if verdict.start > num_targets:
            full = kept is None and len(self._waiting) >= MAX_EARLY
            if full or self._bytes - freed + _size(verdict) > MAX_EARLY_BYTES:
                return
        self._waiting[verdict.start] = verdict
        self._bytes += _size(verdict) - freed

    def pop(self, num_targets: int) -> Verdict | None:
        """A verdict that begins at or before the next target; None without one."""
        first = min(self._waiting, default=None)
        if first is None or first > num_targets:
            return None
        verdict = self._waiting.pop(first)
        self._bytes -= _size(verdict)
        return verdict


def _says(verdict: Verdict) -> tuple[int, bool]:
    return len(verdict.tokens), isinstance(verdict, Rejected)


def _size(verdict: Verdict) -> int:
    """Bytes of its tokens and distributions."""
    dists = list(verdict.dists)
    if isinstance(verdict, Rejected):
        dists += [dist for dist in (verdict.head, verdict.plain) if dist is not None]
    return len(verdict.tokens) + sum(len(dist.ids) + len(dist.probs) for dist in dists)


SYNC_INTERVAL_S: Final = 1.0
MIN_PACED: Final = 16  # tokens of an answer that tells how fast answers are


class Drafter:
    """The device, which faces the client or not."""

    def __init__(self, config: MachineConfig) -> None:
        self._config = config
        self._tree = PrefixTree(len(config.targets))
        self._options = options = options_of(config)
        stats = config.stats or OnlineStats()
        reads_dists = verifier_of(config).reads_dists
        heads = not (config.needs_dists or options.needs_dists or reads_dists)
        # A draft that is drawn needs the distribution it is drawn from, and a form the mask.
        self._ngrams = None if reads_dists or config.mask else NgramDrafts.of(config, stats)
        self._decoder = BranchDecoder(
            config.sampling,
            config.vocab_size,
            rescoring=options.rescoring,
            mask=config.mask,
            eos_ids=config.eos_ids,
            keep_heads=self._ngrams is not None,
            keep_plain=config.needs_dists,
            samples=heads,
            heads=heads,
        )
        self._timing = stats.timing
        self._answers = stats.offload.pace
        self._first: tuple[int, float] | None = None  # targets when the cloud's first came, and when
        self._pace = Pace(options, stats.offload, config.energy)
        self._bandwidth = config.bandwidth
        self._targets = list(config.targets)
        self._now = 0.0
        self._started = self._finished = self._ended = False
        self._synced, self._next_sync = len(self._targets), 0.0  # targets when last looked at, and when next
        self._rtt = config.rtt
        self._watch = PeerWatch(config, self._decoder)
        self._alone = 0
        self._counts = DraftCounts()
        self._meet_peer(config.epoch, linked=config.has_peer)

    def _meet_peer(self, epoch: int, *, linked: bool) -> None:
        self._epoch, self._linked = epoch, linked
        self._pace.cancel()
        self._drafting = Drafting(
            self._config,
            epoch,
            len(self._targets),
            self._tree,
            self._decoder,
            self._pace,
            self._timing,
            self._counts,
            self._ngrams,
        )
        self._early = EarlyVerdicts()

    # ---- events -----------------------------------------------------------------------------------------------------
    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        effects = self._on(event)
        self._watch.observe(len(self._targets), self._now, linked=self._linked)
        if self._watch.returns and not self._finished:
            return [*effects, *self._open_again()]
        return effects

    def _on(self, event: Event) -> Sequence[Effect]:
        match event:
            case Started(now):
                self._started, self._now = True, now
                opens = self._config.faces_client and self._linked
                opening = [OpenPeer(tuple(self._targets), self._epoch)] if opens else []
                return [Retrieve(), *opening, self._next_wake()]
            case Retrieved(branches, max_new_tokens):
                prefill = self._decoder.start(branches, self._targets, self._tree.head, max_new_tokens)
                if self._ngrams is not None:
                    self._ngrams.start(branches, self._targets)
                return [*prefill, *self._advance()]
            case Scored() | Sampled():
                self._pace.tell(event.spent)
                self._now = max(self._now, event.now)
                return self._scored(take_answer(self._decoder, event, self._now))
            case Received(message, now):
                self._now = max(self._now, now)
                return self._received(message) if message.epoch == self._epoch else []
            case TimerFired(now, rtt, bandwidth, silence):
                self._now, self._rtt, self._bandwidth = now, self._rtt if rtt is None else rtt, bandwidth
                effects = self._wake(silence)
                return effects if self._finished else [*effects, self._next_wake()]
            case LinkLost():
                if not self._config.faces_client:
                    return [self._finish("cancelled")]
                self._watch.lost()
                self._meet_peer(self._epoch, linked=False)
                return self._advance()
            case LinkBack():
                return self._back()
            case Cancelled(reason):
                return [self._finish(reason)]
            case FromDraftModel() | DraftModelLost():
                return []  # it asks none

    def _received(self, message: SessionMessage) -> list[Effect]:
        if not isinstance(message, Verdict):
            return []
        if self._watch.passed_over:
            self._watch.heard(works=bool(message.tokens) or isinstance(message, Rejected))
        if not self._linked:
            return []
        self._early.add(message, len(self._targets))
        return [*self._take_verdicts(), *self._advance()]

    def _back(self) -> list[Effect]:
        """The link is back, and the cloud with it."""
        if self._linked or not self._config.faces_client:
            return []
        if not self._started:
            self._linked = True
            return []  # `Started` will open the session
        return self._open_again()

    def _open_again(self) -> list[Effect]:
        """Open a session with the cloud again, from the last target on."""
        self._watch.opened()
        self._meet_peer(self._epoch + 1, linked=True)
        return [OpenPeer(tuple(self._targets), self._epoch), *self._advance()]

    def _wake(self, silence: float) -> list[Effect]:
        """Time has passed: go on without a cloud that is silent or stuck, or ask for verdicts that may be lost."""
        if self._config.faces_client:
            if self._watch.wake(self._now, silence, self._rtt, linked=self._linked):
                reason = self._watch.pass_over()
                self._meet_peer(self._epoch, linked=False)
                return [PassOver(reason), *self._advance()]
            if self._watch.too_long and self._linked:
                return [ClosePeer()]
        if self._now < self._next_sync:
            return []
        self._next_sync = self._now + 0.9 * SYNC_INTERVAL_S  # wake-ups may come a little early
        synced, self._synced = self._synced, len(self._targets)
        if synced < self._synced or not self._linked:
            return []
        return [Send(VerdictRequest(0, self._epoch, len(self._targets))), *self._drafting.resend(self._now)]

    def _next_wake(self) -> WakeAt:
        listens = self._config.faces_client and self._linked
        return WakeAt(self._now + (LISTEN_S if listens else SYNC_INTERVAL_S))

    def _scored(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        if not nodes:
            return []
        rows, seconds = self._decoder.timed or (0, None)
        if seconds is not None:
            self._timing.add(nodes[0].position, rows, seconds)
        self._pace.computed(seconds if self._linked else None)
        return self._advance()

    # ---- verdicts ---------------------------------------------------------------------------------------------------
    def _take_verdicts(self) -> list[Effect]:
        effects: list[Effect] = []
        while not self._ended and (verdict := self._early.pop(len(self._targets))) is not None:
            tokens = decode_tokens(verdict.tokens)
            fresh = len(self._targets) - verdict.start
            if max(tokens, default=0) >= self._config.vocab_size:
                continue
            lane: Side | None = "cloud" if verdict.documents else None
            given = [(token, _decoded(self._config, verdict.dists, index)) for index, token in enumerate(tokens)][
                fresh:
            ]
            for token, dist in given:
                if not self._permits(token):
                    return [*effects, *self._expel()]
                effects += self._append(token, lane, dist)
            if isinstance(verdict, Rejected) and len(self._targets) == verdict.start + len(tokens) and not self._ended:
                head = _decoded(self._config, [] if verdict.head is None else [verdict.head])
                if head is None or not head.probs.any():
                    continue  # the cloud is asked again, and passed over in the end
                token = self._drafting.recover(head)
                if not self._permits(token):
                    return [*effects, *self._expel()]
                plain = _decoded(self._config, [] if verdict.plain is None else [verdict.plain])
                effects += self._append(token, lane, plain)
                given.append((token, plain))
            if given:
                self._first = self._first or (len(self._targets), self._now)
                self._drafting.verdict_came(self._now, self._rtt)
        return effects

    def _permits(self, token: int) -> bool:
        return self._ended or permits(self._config, self._targets, token)

    def _expel(self) -> list[Effect]:
        """Drop a cloud that breaks the form."""
        self._meet_peer(self._epoch, linked=False)  # `LinkLost` follows, and finds the cloud gone
        return [ClosePeer(BROKEN_FORM)]

    def _append(self, token: int, lane: Side | None, dist: Dist | None) -> list[Effect]:
        if self._ended:
            return []  # the cloud knows no stop string, nor where the client's limit is reached
        if self._ngrams is not None:
            self._ngrams.observe_target(self._tree.head, token)
        self._drafting.target(token)
        self._targets.append(token)
        stops = token in self._config.eos_ids
        self._ended = stops or len(self._targets) >= self._config.max_tokens
        if stops or not self._config.faces_client:
            return []
        return [Emit(token, dist, lane, rest=0.0 if dist is None else dist.tail)]

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Effect]:
        """Do everything that has become possible: targets of its own where the cloud is gone, drafts, a forward."""
        if self._ngrams is not None and len(self._targets) > len(self._config.targets):
            self._ngrams.read()  # not sooner: the first token would wait for it
        effects: list[Effect] = []
        if not self._linked:
            effects += self._decide_alone()
        if self._ended:
            stopped = bool(self._targets) and self._targets[-1] in self._config.eos_ids
            return [*effects, self._finish("stop" if stopped else "length")] if self._config.faces_client else effects
        if not self._decoder.started:
            return effects
        if not self._linked:
            if not self._decoder.fits(len(self._targets)):
                return [*effects, self._finish("length")]
            head = self._tree.head
            waits = self._config.waits_for_peer
            return effects if waits else [*effects, *forward_to(head, self._decoder, head, self._now)]
        return [*effects, *self._drafting.draft(self._now, self._bandwidth, self._rtt)]

    def _decide_alone(self) -> list[Effect]:
        effects: list[Effect] = []
        config = self._config
        while not (self._ended or config.waits_for_peer) and (own := self._tree.head.own_dist) is not None:
            self._alone += 1
            lane = None if self._decoder.log_evidence is None else config.side
            effects += self._append(own.token(config.sampling, len(self._targets)), lane, self._tree.head.plain)
        return effects

    def _finish(self, reason: FinishReason) -> Finish:
        self._finished = True
        if self._first is not None and self._linked and not self._alone:
            tokens = len(self._targets) - self._first[0]
            if tokens >= MIN_PACED:
                self._answers.add((self._now - self._first[1]) / tokens, self._now)
        self._pace.finish()
        return Finish(reason, _stats(self._decoder, self._counts, self._alone))


def _decoded(config: MachineConfig, dists: Sequence[DistPayload], index: int = 0) -> Dist | None:
    """The distribution of a target; None where it is absent or cannot be decoded."""
    if index >= len(dists):
        return None
    try:
        return decode_head(dists[index], config.vocab_size)
    except RemoteProtocolError:
        return None


def _stats(decoder: BranchDecoder, counts: DraftCounts, alone: int) -> dict[str, float]:
    """Figures of the answer's report."""
    return {
        "forwards": float(decoder.forwards),
        "rows": float(decoder.rows),
        "drafted": float(counts.drafted),
        "accepted": float(counts.accepted),
        "looked_up": float(counts.looked_up),
        "second_accepted": float(counts.second),
        "alone": float(alone),
    }
