"""`draft_verify` (GELATO): the device drafts, the cloud verifies, and the text is the cloud model's own. The strategy's
record, and the device's machine.

With the verifier *agreement* a target is a function of the seed and the prefix alone, sampled from the cloud's
distribution: never of drafts, timing or message order. So the cloud verifies drafts from look-up tables of its own
beside the device's. With the others it is drawn from that distribution, and depends on the drafts. What the device
drafts from, its own model over messages that the cloud knows, holds nothing private.

The device drafts a chain and takes its targets from the cloud's verdicts. Drafts are its own samples with the common
noise: where both models agree on a prefix, so do their tokens. Without the cloud the front continues with its own
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.dist import Dist
from paceline.core.side import Side
from paceline.errors import RemoteProtocolError
from paceline.strategies.base import (
    JOINT_LEVELS,
    ClosePeer,
    Effect,
    Emit,
    Finish,
    FinishReason,
    Machine,
    MachineConfig,
    Sampled,
    Scored,
    Send,
    Strategy,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import NgramDrafts, PrefixNode, PrefixTree
from paceline.strategies.draft_verify.drafting import DraftCounts, Drafting
from paceline.strategies.draft_verify.pace import Pace
from paceline.strategies.draft_verify.target_writer import TargetWriter
from paceline.strategies.draft_verify.verifiers import accepts, check, choose, options_of, verifier_of
from paceline.strategies.joint import BROKEN_FORM, LANES, EarlyTargets, Joint, JointAnswer
from paceline.wire.codec import decode_head
from paceline.wire.messages import DistPayload, SessionMessage, SyncState, Targets
from paceline.wire.verify_messages import VERIFY_MESSAGES, Rejected, VerifyOptions


class Drafter(Joint):
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
        super().__init__(config, tree, decoder, JointAnswer(config, tree, ngrams), stats.timing, ngrams)
        self._pace = Pace(options, stats.offload, config.means.energy)
        self._counts = DraftCounts()
        self._meet_peer()

    def _meet_peer(self) -> None:
        self._pace.interrupt()
        self._drafting = Drafting(
            self._config,
            self._epoch,
            len(self._answer.targets),
            self._tree,
            self._decoder,
            self._pace,
            self._timing,
            self._counts,
            self._ngrams,
        )
        self._early = EarlyTargets()

    # ---- events -----------------------------------------------------------------------------------------------------
    def _brings_on(self, message: SessionMessage) -> bool:
        return isinstance(message, Targets) and (bool(message.tokens) or isinstance(message, Rejected))

    def _received(self, message: SessionMessage) -> list[Effect]:
        if not isinstance(message, Targets) or self._answer.ended:
            return []
        self._early.add(message, len(self._answer.targets))
        return [*self._take_verdicts(), *self._advance()]

    def _synchronise(self, *, progressed: bool) -> list[Effect]:
        """Ask for verdicts that may be lost."""
        if progressed or not self._linked:
            return []
        return [
            Send(SyncState(0, self._epoch, 0, len(self._answer.targets), waits=True)),
            *self._drafting.resend(self._now),
        ]

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
        answer = self._answer
        while not answer.ended and (verdict := self._early.pop(len(answer.targets))) is not None:
            if max(verdict.tokens, default=0) >= self._config.output.vocab_size:
                continue
            fresh, lanes = len(answer.targets) - verdict.start, verdict.lanes or bytes(len(verdict.tokens))
            came = len(answer.targets)
            for index in range(fresh, len(verdict.tokens)):
                dist = _decoded(self._config, verdict.dists[index] if verdict.dists else None)
                if not (answer.ended or answer.permits(verdict.tokens[index])):
                    return [*effects, *self._expel()]
                effects += self._append(verdict.tokens[index], LANES[lanes[index]], dist)
            if isinstance(verdict, Rejected) and verdict.head is not None and not answer.ended:
                head = _decoded(self._config, verdict.head)
                if head is None or not head.probs.any() or len(answer.targets) != verdict.start + len(verdict.tokens):
                    continue  # the cloud is asked again, and passed over in the end
                token = self._drafting.recover(head)
                if not answer.permits(token):
                    return [*effects, *self._expel()]
                effects += self._append(token, LANES[verdict.lane], _decoded(self._config, verdict.plain))
            if len(answer.targets) > came:
                self._drafting.verdict_came(self._now, self._rtt)
        return effects

    def _expel(self) -> list[Effect]:
        """Drop a cloud that breaks the form."""
        self._meet(self._epoch, linked=False)  # `LinkLost` follows, and finds the cloud gone
        return [ClosePeer(BROKEN_FORM)]

    def _append(self, token: int, lane: Side | None, dist: Dist | None) -> list[Effect]:
        if self._answer.ended:
            return []  # the cloud knows no stop string, nor where the client's limit is reached
        self._drafting.compare(token)
        effects = super()._append(token, lane, dist)
        self._drafting.moved(self._tree.head)
        return effects

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Effect]:
        """Do everything that has become possible: targets of its own where the cloud is gone, drafts, a forward."""
        num_targets = len(self._answer.targets)
        if self._ngrams is not None and num_targets > len(self._config.seat.targets):
            self._ngrams.read()  # not sooner: the first token would wait for it
        if not self._linked:
            return self._write_alone()
        if self._answer.ended:
            return self._end()
        return self._drafting.draft(self._now, self._bandwidth, self._rtt) if self._decoder.started else []

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._pace.finish()
        return super()._finish(reason, end)

    def stats(self) -> dict[str, float]:
        decoder = self._decoder
        counts = {"forwards": decoder.forwards, "rows": decoder.rows, "alone": self._alone} | asdict(self._counts)
        return {name: float(count) for name, count in counts.items()}


def _decoded(config: MachineConfig, payload: DistPayload | None) -> Dist | None:
    """The distribution; None where there is none, or it cannot be decoded."""
    try:
        return None if payload is None else decode_head(payload, config.output.vocab_size)
    except RemoteProtocolError:
        return None


def machine(config: MachineConfig) -> Machine:
    return Drafter(config) if config.seat.side == "device" else TargetWriter(config)


draft_verify = Strategy(
    name="draft_verify",
    machine=machine,
    text_of="cloud",
    needs_peer=True,
    joins_with_documents=("cloud",),  # a device would draft from private ones
    options=VerifyOptions,
    messages=(*VERIFY_MESSAGES, Targets, SyncState),
    privacy_levels=JOINT_LEVELS,
    check=check,
    choose=choose,
    accepts=accepts,
)
