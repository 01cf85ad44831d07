"""The cloud's machine: verifies the device's chain and drafts from its own tables in one forward a step, and writes the
text.

At each row the verifier decides the next target, and the machine goes on as long as the chain holds it. With
*agreement* it never waits by default: without drafts it decodes, and a draft that comes late is of use where it
continues what was decoded meanwhile. The other verifiers wait for drafts, and *rejection* for the tokens that the
device draws in place of rejected ones; none waits for a device that has said that it drafts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from paceline.core.batching.segment import StepSize
from paceline.core.clock import StepClock
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.sampler import filter_top
from paceline.core.sampling.sampler import head as head_of
from paceline.errors import RemoteProtocolError
from paceline.strategies.base import Branch, Effect, Emit, MachineConfig, Sampled, Scored, Send, Side, WakeAt
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.decoding.table_drafts import LEARN_DELAY_S, Guess, TableDrafts
from paceline.strategies.draft_verify.verifiers import Draft, Outcome, options_of, verifier_of
from paceline.strategies.joint import LANES, Joint, JointAnswer
from paceline.wire.codec import encode_head
from paceline.wire.messages import DistPayload, SessionMessage, SyncState, Targets
from paceline.wire.verify_messages import DraftChain, Rejected

# The verifier's copy of the drafter's chain, put together from its messages.


class PeerChain:
    """A chain hangs below the first `base` targets. A later base replaces the chain: the drafter has gone another way.

    A message that comes before the one it follows is dropped: the drafter's tokens are a help, never a need.
    """

    def __init__(self) -> None:
        self._base = 0
        self._drafts: list[Draft] = []
        self.ended = False  # the drafter has said that it drafts no more below this base
        self.idle = False  # it has drafted nothing there, and says so again only when it drafts: it is not waited for

    def receive(self, message: DraftChain, drafts: Sequence[Draft]) -> None:
        """drafts: those of the message."""
        if message.base < self._base:
            return
        if message.base > self._base:
            self._base, self._drafts, self.ended = message.base, [], False
        end = message.offset + len(drafts)
        if message.offset <= len(self._drafts) < end:
            self._drafts[message.offset :] = drafts
            self.ended = self.idle = False
        says_so = message.last or not drafts
        self.ended = self.ended or (says_so and end == len(self._drafts))
        self.idle = self.idle or (self.ended and not self._drafts)

    def below(self, targets: Sequence[int]) -> list[Draft] | None:
        """Drafts that follow these targets, from the first on; None where the drafter does not know all of them, or
        has drafted others."""
        known = len(targets) - self._base
        if known < 0 or [draft.token for draft in self._drafts[:known]] != list(targets[self._base :]):
            return None
        return self._drafts[known:]


WAKE_INTERVAL_S: Final = 1.0
MAX_ROWS: Final = 64  # drafts of one forward, however many a device sends
MAX_VERDICT: Final = 1024  # targets of one message; a device that lacks more asks again
TOP_IDS: Final = 32  # of a target's distribution, for logprobs at the device


class TargetWriter(Joint):
    """The cloud, which faces the client or not."""

    watches = False  # it writes by itself

    def __init__(self, config: MachineConfig) -> None:
        self._options = options_of(config)
        self._verifier = verifier_of(config)
        self._sends_dists = self._options.needs_dists and not config.seat.faces_client
        stats, tree = config.means.stats or OnlineStats(), PrefixTree(len(config.seat.targets))
        decoder = BranchDecoder(
            config.output,
            rescoring=self._options.rescoring,
            lazy=True,
            keep_plain=config.output.needs_dists or self._options.needs_dists,
            samples=config.takes_tokens and not (self._options.needs_dists or self._verifier.reads_dists),
        )
        super().__init__(config, tree, decoder, JointAnswer(config, tree), StepClock())
        self._dists: list[DistPayload] = []  # of the targets since `config.seat.targets`, where verdicts carry them
        self._waiting = False  # for drafts, until the next wake-up at most
        self._left: Dist | None = None  # head of the distribution of the next target, which the device draws
        self._left_plain: DistPayload | None = None  # the model's own there, for logprobs
        self._drafter_silent = False  # they did not come in that time; not waited for until the next ones do
        self._resent = False  # verdicts, since the last wake-up: a few bytes that ask for all of them are answered once
        self._verified = self._accepted = 0
        self._tables = self._table_drafts()
        self._looked_up: set[PrefixNode] = set()  # drafts from tables in the forward under way
        self._rates = stats.peer_ranks  # of the device's drafts, by `_rate_class`
        self._next_look, self._learns = 0.0, False  # when to see to the device next; there is more to learn at once
        self._meet_peer()

    def _meet_peer(self) -> None:
        self._chain = PeerChain()
        self._opened_at = len(self._answer.targets)  # when the device was asked to take part

    def _table_drafts(self) -> TableDrafts | None:
        """Drafts from this side's own tables. The other verifiers judge drafts by what they were drawn from."""
        config = self._config
        if config.means.table is None or self._options.drafting.ahead == 0 or self._verifier.needs_drafts:
            return None
        if self._options.needs_dists:
            config = replace(config, output=replace(config.output, needs_dists=True))
        return TableDrafts(config, self._tree, self._decoder)

    # ---- events -----------------------------------------------------------------------------------------------------
    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        tables = self._tables
        if tables is None:
            return super()._begin(branches, max_new_tokens)
        targets, head, rows = self._answer.targets, self._tree.head, tables.begin(branches)
        effects = self._decoder.start(branches, targets, head, max_new_tokens, num_prompt_dists=rows)
        return [*effects, *tables.first_wake(self._now)]

    def _computed(self, event: Scored | Sampled, nodes: Sequence[PrefixNode]) -> list[Effect]:
        return self._verify(event.step) if nodes else []

    def _brings_on(self, message: SessionMessage) -> bool:
        return isinstance(message, DraftChain)

    def _received(self, message: SessionMessage) -> list[Effect]:
        match message:
            case DraftChain():
                return self._take_drafts(message)
            case SyncState(targets=known) if known <= len(self._answer.targets) and not self._resent:
                self._resent = True
                return [self._verdict(max(known, len(self._config.seat.targets)))]
            case _:
                return []

    def _take_drafts(self, message: DraftChain) -> list[Effect]:
        try:
            drafts = self._verifier.received(message)
        except RemoteProtocolError:
            return []
        self._drafter_silent = False
        self._chain.receive(message, drafts)
        recovered = message.recovered
        if self._left is None or recovered is None:
            return self._verify() if self._waiting else []
        if message.base != len(self._answer.targets) + 1 or not self._left.prob(recovered) > 0.0:
            return []
        effects = self._write(recovered, self._left_plain, None)
        self._left = None
        return [*effects, *self._verify()]  # it may be a draft, whose row is known

    def _wake(self, silence: float) -> list[Effect]:
        """Time to learn, to see to the device, or both."""
        self._learns = self._tables is not None and self._tables.learn()
        return super()._wake(silence) if self._now >= self._next_look else []

    def _next_wake(self) -> WakeAt:
        if self._now >= self._next_look:
            self._next_look = self._now + WAKE_INTERVAL_S
        return WakeAt(self._now if self._learns else self._next_look)

    def _synchronise(self, *, progressed: bool) -> list[Effect]:
        """Go on without drafts that were waited for. A sign of life for a device that has seen no target since the last
        wake-up; it closes the session if it has finished, and its word of that was lost."""
        self._resent = False
        self._drafter_silent = self._drafter_silent or self._waiting
        effects = self._verify() if self._waiting else []
        alive = self._linked and not progressed and not self._config.seat.faces_client
        return [*effects, self._verdict(len(self._answer.targets))] if alive else effects

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _advance(self) -> list[Effect]:
        return self._verify()

    def _verify(self, step: StepSize | None = None) -> list[Effect]:
        """Take the accepted drafts and one token more, tell the device, and ask for the next forward. step: of the
        engine, where a forward was answered."""
        self._waiting = False
        accepted = self._accepted
        config, head = self._config, self._tree.head
        targets = self._answer.targets
        first = len(targets)
        effects: list[Effect] = []
        end: Emit | None = None
        looked_up = 0
        while not self._is_over(head) and (outcome := self._decide(head)) is not None:
            if isinstance(outcome, Dist):
                self._left, self._left_plain = outcome, self._payload(head, outcome.ids)
                break
            payload = self._payload(head, np.array([outcome], dtype=np.int32))
            branches = self._decoder.mixer.decided_by
            if outcome in config.output.eos_ids:
                end = Emit(outcome, head.plain, self._lane, branches)
            else:
                self._rate(outcome)
            effects += self._write(outcome, payload, head.plain, branches)
            head = self._tree.head  # a draft is accepted here: its row is cached
            self._accepted += head.cached and head not in self._looked_up
            looked_up += head in self._looked_up
        if self._tables is not None and step is not None:
            fresh, others = targets[first : len(targets) - (end is not None)], self._accepted - accepted
            self._tables.walked(fresh, looked_up, step, ends=self._is_over(head), others=others)
            self._looked_up.clear()
        elif not any(child.cached for child in head.children.values()):  # else rows that drafts to come may lead to
            self._decoder.pop_branch_dists()
        if self._linked and (len(targets) > first or self._left is not None):
            effects.append(self._verdict(first))
        if self._is_over(head):
            return [*effects, *self._over(end)]
        effects += self._compute()
        due = step is not None and self._tables is not None and self._tables.is_due
        return [*effects, WakeAt(self._now + LEARN_DELAY_S)] if due else effects

    def _rate(self, target: int) -> None:
        """Count what the device's draft in the place of the next target was worth."""
        drafts = self._chain.below(self._answer.targets) if self._linked and self._tables is not None else None
        if drafts:
            rank = 0 if drafts[0].token == target else 1 if drafts[0].second == target else None
            self._rates.add(_rate_class(drafts[0]), rank)

    def _decide(self, head: PrefixNode) -> Outcome | None:
        """The next target, once its row is known, and where the verifier needs one a draft."""
        if not self._verifier.needs_drafts:
            return self._decoder.sample(head)
        drafts = self._chain.below(self._answer.targets) if self._linked else None
        dist = self._decoder.dist(head)  # kept, until drafts come
        if not drafts:
            return None if self._awaits(drafts) else self._decoder.sample(head)
        sampling = self._config.output.sampling
        return None if dist is None else self._verifier.decide(head.position, filter_top(dist, sampling), drafts[0])

    def _awaits(self, drafts: Sequence[Draft] | None) -> bool:
        """More drafts are on their way. drafts: that are there, none; None: none that follow the targets."""
        if not (self._options.waits and self._linked) or self._drafter_silent or self._chain.idle:
            return False
        if self._verifier.needs_drafts and (not self._options.most or len(self._answer.targets) == self._opened_at):
            return False  # the first one does not wait for the device to have read the prompt
        return not (drafts == [] and self._chain.ended)

    def _payload(self, node: PrefixNode, ids: IdArray) -> DistPayload | None:
        """What verdicts carry of the model's own distribution after a node: its most probable ids, and these. None
        where they carry none."""
        plain = node.plain
        if not self._sends_dists or plain is None:
            return None
        places = np.flatnonzero(np.isin(plain.ids, np.union1d(head_of(plain, TOP_IDS).ids, ids)))
        return encode_head(Dist(plain.ids[places], plain.probs[places] / plain.probs.sum()), precise=True)

    @property
    def _lane(self) -> Side | None:
        return None if self._decoder.log_evidence is None else self._config.seat.side

    def _write(
        self, token: int, payload: DistPayload | None, plain: Dist | None, branches: frozenset[int] | None = None
    ) -> list[Effect]:
        """The next target. payload: what verdicts carry of its distribution."""
        if payload is not None:
            self._dists.append(payload)
        return self._answer.append(token, self._lane, plain, branches)

    def _is_over(self, head: PrefixNode) -> bool:
        ended = self._answer.ended or head.position >= self._config.output.max_tokens
        return ended or not self._decoder.fits(head.position)

    def _over(self, end: Emit | None) -> list[Effect]:
        """No more targets: all are known, or the context has ended and the answer has not."""
        is_whole = self._answer.ended or len(self._answer.targets) >= self._config.output.max_tokens
        return self._end(end) if is_whole or self._config.seat.faces_client else [self._finish("length")]

    def _verdict(self, start: int) -> Send:
        """The targets from there on, as many as fit a frame with their distributions."""
        end = start + MAX_VERDICT
        first = len(self._config.seat.targets)
        dists = self._dists[start - first : end - first]
        tokens = self._answer.targets[start:end]
        lanes = b"" if self._config.seat.faces_client else bytes(map(LANES.index, self._answer.lanes[start:end]))
        if self._left is None or end < len(self._answer.targets):
            return Send(Targets(0, self._epoch, start, tokens, lanes, b"", dists))
        head = encode_head(self._left, precise=self._options.needs_dists)
        return Send(
            Rejected(0, self._epoch, start, tokens, lanes, b"", dists, head, self._left_plain, LANES.index(self._lane))
        )

    def _compute(self) -> list[Effect]:
        """A forward of the rows that are missing and of the drafts below them, or a wait for drafts."""
        decoder, head = self._decoder, self._tree.head
        if not decoder.idle or self._is_over(head) or self._left is not None:
            return []
        drafts = self._chain.below(self._answer.targets) if self._linked else []
        if not drafts and self._awaits(drafts):
            self._waiting = True
            return []
        self._waiting = False
        effects = decoder.commit_to(head)
        nodes = self._nodes(head, drafts or [])
        self._verified += len(nodes) - len(self._looked_up)
        return [*effects, *decoder.append_rows([*decoder.missing_rows(head), *nodes], head, self._now)]

    def _nodes(self, head: PrefixNode, drafts: Sequence[Draft]) -> list[PrefixNode]:
        """The drafts as nodes below the head, up to one that cannot be a row, their second guesses beside them, and as
        many more of this side's tables as pay."""
        last = self._config.output.max_tokens - 1  # a longer prefix has no next token
        most = min(MAX_ROWS if self._options.most else 0, self._decoder.spare_rows(self._decoder.missing_rows(head)))
        chain: list[PrefixNode] = []
        seconds: list[PrefixNode] = []
        node = head
        for draft in drafts[:most]:
            if node.position >= last or not self._decoder.fits(node.position + 1):
                break
            if draft.second is not None and draft.second not in self._config.output.eos_ids:
                seconds.append(node.child(draft.second))
            if draft.token in self._config.output.eos_ids:
                break
            node = node.child(draft.token)
            chain.append(node)
        tables = self._tables
        if tables is None:
            return self._decoder.admitted(head, [*chain, *seconds[: most - len(chain)]])
        guesses = [self._guess(draft) for draft in drafts[: len(chain)]]
        nodes = tables.worth(guesses, [*chain, *seconds])[:most]
        given = set(nodes)
        for node in (*chain, *seconds):
            if node.alive and node not in given:
                self._tree.drop(node)
        guesses = guesses[: sum(node in given for node in chain)]
        room = self._decoder.spare_rows([*self._decoder.missing_rows(head), *nodes])
        nodes += [node for node in tables.draft(guesses, len(nodes)) if not node.cached]
        admitted = self._decoder.admitted(head, nodes)
        looked_up = [node for node in admitted if node not in given][:room]
        self._looked_up = set(looked_up)
        for node in nodes:
            if node.alive and not (node in self._looked_up or (node in given and node in admitted)):
                self._tree.drop(node)
        tables.sent(looked_up)
        return [node for node in admitted if node in given or node in self._looked_up]

    def _guess(self, draft: Draft) -> Guess:
        first, second = self._rates.probs(_rate_class(draft))[:2]
        return Guess(draft.token, first, draft.second, second)

    def stats(self) -> dict[str, float]:
        counts = {"forwards": self._decoder.forwards, "rows": self._decoder.rows}
        counts |= {"drafted": self._verified, "accepted": self._accepted}
        tables = {} if self._tables is None else self._tables.stats()
        stats = {name: float(count) for name, count in counts.items()}
        return stats | {f"tables_{name}": value for name, value in tables.items()}


def _rate_class(draft: Draft) -> int:
    """Class of a device's draft in `OnlineStats.peer_ranks`: with a second guess, which the device has where it is
    unsure, and without."""
    return int(draft.second is None)
