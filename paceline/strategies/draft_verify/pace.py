"""How much the device drafts: GELATO's two loops over what its steps have cost and given.

A *step* is a run of drafts that is sent as a whole; one that could have been and has no draft is a step too. Without an
energy budget the outer loop maximises throughput alone.

Joules are those that the machine was told; where it was not, power x seconds. The forwards of the prompt, and those
with which a device goes on without its cloud, are not drafting, and no budget counts them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from paceline.core.energy import NOT_KNOWN, Spent
from paceline.core.offloading import (
    THROUGHPUT_WEIGHT,
    EnergyQueue,
    EntropyGate,
    OffloadStats,
    Prediction,
    choose_length,
    utility,
    weight_of,
)
from paceline.wire.verify_messages import VerifyOptions

FIRST_BITS: Final = 32.0  # of a draft, before any was sent
FIRST_EXAMINED: Final = 32  # drafts, before which the entropy gate knows nothing and stays open
PROBE_STEPS: Final = 16  # of so many steps one ignores the gate
PROBE_SHARE: Final = 0.25  # of the budget at most, that the looks beyond the gate may take
STREAMED_STAYS: Final = 1.1  # times a cloud's own speed that drafting must promise, where it has none to wait for
OVERLAP_LEAST: Final = 0.2  # probability of being wanted, below which no further step is drafted ahead of a verdict


class Pace:
    """The loops of one answer."""

    def __init__(self, options: VerifyOptions, stats: OffloadStats, queue: EnergyQueue | None = None) -> None:
        """queue: with this answer's budget; None: that of `stats`, if it has one."""
        self._options, self.stats = options, stats
        self._queue = stats.queue if queue is None else queue
        self._gate: EntropyGate | None = None
        self._intended = self._drafted = 0
        self._step_j = 0.0  # spent and not yet in the queue
        self._accepted = 0  # drafts, since the last step
        self._foreseen: Prediction | None = None  # of the step, and not calibrated
        self._told = NOT_KNOWN  # of forwards that are not counted yet
        self._verdict_at: float | None = None  # when the last verdict came
        self._streams = False  # it came without drafts being waited for
        self.open = False  # a step is being drafted
        self.looks = False  # the step has no drafts, and what one would have been is to be compared with the target

    def begin(self, ahead: int, draft_s: float, bandwidth: float | None, rtt: float | None = None) -> bool:
        """Begin a step. False: drafting does not pay now.

        ahead: drafts that wait for their verdict, all of which must be accepted for this step to be of use. draft_s:
        seconds of a draft. bandwidth: bytes/s; None: no limit is known. rtt: s; None: not known.
        """
        options, stats = self._options, self.stats
        likely = stats.estimates.rho**ahead
        self.looks = False
        if ahead and (not options.overlap or likely < OVERLAP_LEAST):
            return False
        num_bytes = (stats.estimates.bits.value or FIRST_BITS) / 8.0
        send_s = 0.0 if bandwidth is None else num_bytes / bandwidth
        forward_j, byte_j, queue = stats.energy.forward.value, stats.energy.byte.value, self._queue
        draft_j = stats.compute_w * draft_s if forward_j is None else forward_j
        send_j = stats.send_w * send_s if byte_j is None else byte_j * num_bytes
        cost = 1.0 if queue is None else stats.energy.cost.value

        def predict(drafts: int) -> Prediction:
            step = stats.estimates.predict(
                drafts,
                draft_s=draft_s,
                draft_j=draft_j,
                send_s=send_s,
                send_j=send_j,
            )
            # A verifier that does not wait computes meanwhile: drafting takes none of the answer's time.
            seconds = step.seconds if options.waits else stats.estimates.verification_s
            return Prediction(1.0 + likely * (step.tokens - 1.0), seconds, cost * step.joules)

        # What is never drafted is never examined: without a look now and then a first guess would hold for ever.
        explores = stats.examined < FIRST_EXAMINED or stats.steps % PROBE_STEPS == 0
        if queue is not None and draft_j + send_j > PROBE_SHARE * PROBE_STEPS * queue.allowance(1.0):
            explores = False  # it alone would take the budget
        stats.steps += 1
        self._intended = options.most
        if not options.fixed:
            worth = partial(
                utility,
                backlog=0.0 if queue is None else queue.backlog,
                weight=self._weight(cost * (draft_j + send_j)),
                earned=0.0 if queue is None else queue.per_token * stats.energy.gain.value,
            )
            may_stream = options.waits and not (ahead or options.least)
            least = 0 if ahead or may_stream else min(max(options.least, int(explores)), options.most)
            self._intended = choose_length(predict, worth, least=least, most=options.most)
            if may_stream and worth(self._streamed(rtt)) > worth(
                self._ahead(predict(self._intended), draft_s + send_s)
            ):
                self._intended = 0
            self.looks = may_stream and explores and not self._intended
        foreseen = predict(self._intended)
        self._foreseen = Prediction(foreseen.tokens, foreseen.seconds, foreseen.joules / cost)
        # Entropy tells which drafts are wasted, and without a budget waste costs nothing.
        gated = options.gate and queue is not None and not (options.fixed or explores)
        self._gate = EntropyGate(stats.acceptance.slope) if gated else None
        self._drafted = 0
        self.open = self._intended > 0
        if not (self.open or ahead):
            self._close()  # a step of the verifier alone pays off a debt too
        return self.open

    def _streamed(self, rtt: float | None) -> Prediction:
        """A token of a verifier that waits for drafts and is told that there are none: it decodes, without a round
        trip for each token. To begin again costs one: while it lasts, it counts as somewhat faster."""
        stays = STREAMED_STAYS if self._streams else 1.0
        return Prediction(1.0, self.stats.estimates.streamed_s(rtt) / stays, 0.0)

    def _ahead(self, step: Prediction, draft_s: float) -> Prediction:
        """The step, in the seconds it takes where others are drafted ahead of its verdict: then a verdict is waited for
        after a rejected draft alone. draft_s: of a draft that is computed and sent."""
        if not self._options.overlap:
            return step
        estimates = self.stats.estimates
        token_s = estimates.rho * draft_s + (1.0 - estimates.rho) * estimates.verification_s
        return Prediction(step.tokens, min(step.seconds, step.tokens * token_s), step.joules)

    def _weight(self, draft_j: float) -> float:
        """V: J per token/s. draft_j: of a draft computed and sent."""
        weight = THROUGHPUT_WEIGHT if self._queue is None else self._queue.weight
        return weight_of(draft_j, self.stats.round_s.value or 1.0) if weight is None else weight

    def nats_of(self, prob: float) -> float:
        """Entropy at which a draft of the model's is as likely to be accepted."""
        return -math.log(max(prob, 1e-9)) / self.stats.acceptance.slope

    @property
    def complete(self) -> bool:
        """The open step has all drafts that were intended."""
        return self._drafted >= self._intended

    @property
    def empty(self) -> bool:
        """The open step has no draft yet."""
        return self._drafted == 0

    def admits(self, nats: float) -> bool:
        """The next draft, from a distribution of that entropy, belongs to the step."""
        if self.complete:
            return False
        unsure = self._gate is not None and not self._gate.admits(nats)
        if unsure and self._drafted >= self._options.least:
            return False
        self._drafted += 1
        return True

    def tell(self, spent: Spent) -> None:
        """What a forward, and the messages since the one before, have cost."""
        computed = None if spent.computed is None else spent.computed + (self._told.computed or 0.0)
        self._told = Spent(computed, spent.sent)
        if spent.sent is not None:
            self._step_j += spent.sent
            if spent.num_bytes:
                self.stats.energy.byte.add(spent.sent / spent.num_bytes)

    def computed(self, seconds: float | None) -> None:
        """Record the forward that was answered: a draft's, or with None one that no budget counts."""
        told, self._told = self._told.computed, Spent(None, self._told.sent)
        if seconds is None:
            return
        if told is not None:
            self.stats.energy.forward.add(told)
        self._step_j += self.stats.compute_w * seconds if told is None else told

    def end(self, num_bytes: int, bandwidth: float | None) -> None:
        """The step is complete, and sent in so many bytes."""
        stats = self.stats
        stats.estimates.add_chain(self._intended, self._drafted)
        if self._drafted:
            stats.estimates.bits.add(8.0 * num_bytes / self._drafted)
        if bandwidth is not None and self._told.sent is None:
            self._step_j += stats.send_w * num_bytes / bandwidth
        self._close()

    def cancel(self) -> None:
        """The step's drafts have lost their prefix before they were sent; what they cost counts."""
        if self.open:
            self._close()

    def interrupt(self) -> None:
        """The cloud is gone, or another: the time until its next verdict tells of no step."""
        self.cancel()
        self._verdict_at, self._streams = None, False

    def withdraw(self) -> None:
        """The draft that was admitted last is none."""
        self._drafted -= 1

    def finish(self) -> None:
        """The answer has ended; what was spent since the last step counts."""
        if self.open or self._step_j:
            self._close(pays=self.open)

    def _close(self, *, pays: bool = True) -> None:
        """pays: the budget of a step, where that is its unit."""
        joules, self._step_j, self.open = self._step_j, 0.0, False
        self.stats.joules += joules
        if self._foreseen is not None:
            self.stats.energy.cost.add(self._foreseen.joules, joules)
            self.stats.energy.gain.add(self._foreseen.tokens - 1.0, self._accepted)
            self._foreseen, self._accepted = None, 0
        if self._queue is not None:
            self._queue.add(joules) if pays else self._queue.charge(joules)

    def came(self, now: float, tokens: int, *, streamed: bool = False) -> None:
        """Record a verdict with so many targets. streamed: the verifier had been told not to wait for drafts."""
        last, self._verdict_at = self._verdict_at, now
        if last is not None and streamed and self._streams and tokens:
            self.stats.estimates.streamed.add((now - last) / tokens)
        self._streams = streamed
        if last is not None and now > last:
            self.stats.round_s.add(now - last)
        if self._queue is not None and self._queue.per == "token":
            self._queue.add(0.0, tokens)

    def examined(self, nats: float | None, *, accepted: bool, second: bool | None = None) -> None:
        """Record what became of a draft that the verdict has reached. nats: entropy of its distribution. second: its
        second guess was the target; None: it was accepted, or had none."""
        if second is not None:
            self.stats.seconds.add(hit=second)
        self.stats.examined += 1
        self._accepted += accepted
        self.stats.estimates.accepted.add(float(accepted))
        if nats is not None:
            self.stats.acceptance.add(nats, accepted=accepted)
