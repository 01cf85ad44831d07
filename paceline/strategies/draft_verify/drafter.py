"""The device's machine: drafts a chain with its own model, and takes its targets from the cloud's verdicts.

Drafts are the device's own samples with the common noise: where both models agree on a prefix, so do their tokens.
Without the cloud the front continues with its own model.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side
from paceline.errors import RemoteProtocolError
from paceline.strategies.base import ClosePeer, Effect, Emit, MachineConfig, Sampled, Scored, Send
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.peer_watch import BROKEN_FORM, SYNC_INTERVAL_S, PeeredMachine, permits
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
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


class Drafter(PeeredMachine):
    """The device, which faces the client or not."""

    def __init__(self, config: MachineConfig) -> None:
        options = options_of(config)
        stats = config.means.stats or OnlineStats()
        reads_dists = verifier_of(config).reads_dists
        heads = not (config.output.needs_dists or options.needs_dists or reads_dists)
        # A draft that is drawn needs the distribution it is drawn from, and a form the mask.
        ngrams = None if reads_dists or config.output.mask else NgramDrafts.of(config, stats)
        decoder = BranchDecoder(
            config.output,
            rescoring=options.rescoring,
            keep_heads=ngrams is not None,
            keep_plain=config.output.needs_dists,
            samples=heads,
            heads=heads,
        )
        tree = PrefixTree(len(config.seat.targets))
        super().__init__(config, tree, decoder, ngrams, stats.timing, list(config.seat.targets))
        self._pace = Pace(options, stats.offload, config.means.energy)
        self._ended = False
        self._synced, self._next_sync = len(self._targets), 0.0  # targets when last looked at, and when next
        self._alone = 0
        self._counts = DraftCounts()
        self._meet_peer()

    def _meet_peer(self) -> None:
        self._pace.cancel()
        self._drafting = Drafting(
            self._config,
            self._epoch,
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
    def _brings_on(self, message: SessionMessage) -> bool:
        return isinstance(message, Verdict) and (bool(message.tokens) or isinstance(message, Rejected))

    def _received(self, message: SessionMessage) -> list[Effect]:
        if not isinstance(message, Verdict):
            return []
        self._early.add(message, len(self._targets))
        return [*self._take_verdicts(), *self._advance()]

    def _synchronise(self) -> list[Effect]:
        """Ask for verdicts that may be lost."""
        if self._now < self._next_sync:
            return []
        self._next_sync = self._now + 0.9 * SYNC_INTERVAL_S  # wake-ups may come a little early
        synced, self._synced = self._synced, len(self._targets)
        if synced < self._synced or not self._linked:
            return []
        return [Send(VerdictRequest(0, self._epoch, len(self._targets))), *self._drafting.resend(self._now)]

    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:
        self._pace.tell(event.spent)
        if not nodes:
            return []
        seconds = None if self._decoder.timed is None else self._decoder.timed[1]
        self._pace.computed(seconds if self._linked else None)
        return self._advance()

    # ---- verdicts ---------------------------------------------------------------------------------------------------
    def _take_verdicts(self) -> list[Effect]:
        effects: list[Effect] = []
        while not self._ended and (verdict := self._early.pop(len(self._targets))) is not None:
            tokens = decode_tokens(verdict.tokens)
            fresh = len(self._targets) - verdict.start
            if max(tokens, default=0) >= self._config.output.vocab_size:
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
                self._drafting.verdict_came(self._now, self._rtt)
        return effects

    def _permits(self, token: int) -> bool:
        return self._ended or permits(self._config, self._targets, token)

    def _expel(self) -> list[Effect]:
        """Drop a cloud that breaks the form."""
        self._meet(self._epoch, linked=False)  # `LinkLost` follows, and finds the cloud gone
        return [ClosePeer(BROKEN_FORM)]

    def _append(self, token: int, lane: Side | None, dist: Dist | None) -> list[Effect]:
        if self._ended:
            return []  # the cloud knows no stop string, nor where the client's limit is reached
        if self._ngrams is not None:
            self._ngrams.observe_target(self._tree.head, token)
        self._drafting.target(token)
        self._targets.append(token)
        stops = token in self._config.output.eos_ids
        self._ended = stops or len(self._targets) >= self._config.output.max_tokens
        if stops or not self._config.seat.faces_client:
            return []
        return [Emit(token, dist, lane, rest=0.0 if dist is None else dist.tail)]

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Effect]:
        """Do everything that has become possible: targets of its own where the cloud is gone, drafts, a forward."""
        if self._ngrams is not None and len(self._targets) > len(self._config.seat.targets):
            self._ngrams.read()  # not sooner: the first token would wait for it
        effects: list[Effect] = []
        if not self._linked:
            effects += self._decide_alone()
        if self._ended:
            stopped = bool(self._targets) and self._targets[-1] in self._config.output.eos_ids
            finish = [self._finish("stop" if stopped else "length")] if self._config.seat.faces_client else []
            return [*effects, *finish]
        if not self._decoder.started:
            return effects
        if not self._linked:
            if not self._decoder.fits(len(self._targets)):
                return [*effects, self._finish("length")]
            head = self._tree.head
            waits = self._config.peer.awaited
            return effects if waits else [*effects, *forward_to(head, self._decoder, head, self._now)]
        return [*effects, *self._drafting.draft(self._now, self._bandwidth, self._rtt)]

    def _decide_alone(self) -> list[Effect]:
        effects: list[Effect] = []
        config = self._config
        while not (self._ended or config.peer.awaited) and (own := self._tree.head.own_dist) is not None:
            self._alone += 1
            lane = None if self._decoder.log_evidence is None else config.seat.side
            effects += self._append(own.token(config.output.sampling, len(self._targets)), lane, self._tree.head.plain)
        return effects

    def _report(self) -> dict[str, float]:
        self._pace.finish()
        decoder, counts = self._decoder, self._counts
        return {
            "forwards": float(decoder.forwards),
            "rows": float(decoder.rows),
            "drafted": float(counts.drafted),
            "accepted": float(counts.accepted),
            "looked_up": float(counts.looked_up),
            "second_accepted": float(counts.second),
            "alone": float(self._alone),
        }


def _decoded(config: MachineConfig, dists: Sequence[DistPayload], index: int = 0) -> Dist | None:
    """The distribution of a target; None where it is absent or cannot be decoded."""
    if index >= len(dists):
        return None
    try:
        return decode_head(dists[index], config.output.vocab_size)
    except RemoteProtocolError:
        return None
