"""`aggregate`: distributed RAG with speculative aggregation (DRAGON; specs 1).

Each side continues its own documents and drafts ahead of the targets, as a tree. One side at a time decides: it has
both sides' laws and makes each target of them by a rule (`core.aggregation.registry`); the other follows and ships what
it computes. Who decides is moved by measured speeds (`core.aggregation.placement`), where privacy lets it.

A target is a function of the seed, the prefix, both laws and their weights: never of drafts, trees, timing, message
order or of which side decides. At the level `document-private` a device that follows ships one choice a position with
its documents' summed weight and its pace (`coin`); under the other rules it ships nothing, and decides itself: only
targets go up and, where the cloud faces the client, whose documents each of them came from.

Where scores follow the text (`Options.rescoring`), they are kept per prefix as laws are, so that nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.aggregation.placement import Placement
from paceline.core.aggregation.registry import LAST_LEVEL, make_aggregator
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.estimation.timing import DecodeSpeed as Speed
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import filter_top, sample
from paceline.core.side import Side, other
from paceline.strategies.aggregate.exchange import DraftExchange
from paceline.strategies.aggregate.ngram_drafts import NgramDrafts
from paceline.strategies.aggregate.options import (
    accepts,
    aggregator_of,
    check,
    choose,
    draft_limits,
    options_of,
    pinned_side,
)
from paceline.strategies.aggregate.side_weights import SideWeights
from paceline.strategies.aggregate.stats import AggregateStats
from paceline.strategies.aggregate.tree_planner import DraftTreePlanner
from paceline.strategies.base import (
    Cancelled,
    ClosePeer,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    LinkBack,
    LinkLost,
    MachineConfig,
    OpenPeer,
    Received,
    Retrieve,
    Retrieved,
    Scored,
    Send,
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.strategy import JOINT_LEVELS, Strategy
from paceline.wire.messages import (
    STRATEGY_MESSAGES,
    AggregateOptions,
    DetailRequest,
    Drafts,
    EvidenceWeight,
    Handover,
    SessionMessage,
    SpeedReport,
    SyncState,
    Targets,
)

FIRST_HOLDER: Side = "device"
MAX_EARLY = 64  # messages of targets that wait for earlier ones, and tokens in each; the rest is asked for again
WAKE_INTERVAL = 1.0  # s without progress before saying what we have
PATIENCE = 8  # wakes without one message from a peer that takes part before going on alone
STALL = 60  # wakes without a target, this side being ready, before the same: the peer lives and does nothing
TIDY = 8  # targets between two looks at names that are not needed any more
TELL_PACE = 0.1  # relative change of the own speed that is worth a message
LANES: tuple[Side | None, ...] = (None, "cloud", "device")  # by their number on the wire


class Aggregate:
    """One side. Three conditions: it decides, follows (the other with a peer), or is alone."""

    def __init__(self, task: MachineConfig) -> None:
        self._task = task
        self._options = options_of(task)
        self._pinned_side = pinned_side(task)
        self._rule = make_aggregator(
            aggregator_of(task), task.sampling, needs_dists=self._options.needs_dists, vocab_size=task.vocab_size
        )
        self._paths = PrefixTree(len(task.targets))
        rescoring = self._options.rescoring and self._rule.name != "coin"  # whose messages have no room for scores
        experience = task.stats or OnlineStats()
        self._forecast = NgramDrafts.of(task, experience)
        self._decoder = BranchDecoder(
            task.sampling,
            task.vocab_size,
            rescoring=rescoring,
            mask=task.mask,
            ends=task.eos_ids,
            heads=self._forecast is not None,
        )
        self._weighing = SideWeights(task.side, self._decoder, rescoring=rescoring)
        self._growth = DraftTreePlanner(
            task.side,
            self._rule,
            task.sampling,
            draft_limits(task),
            task.eos_ids,
            experience,
            weigh=self._weighing.at,
            forecast=self._forecast,
        )
        self._profile = experience.timing
        self._targets = list(task.targets)
        self._lanes = [0] * len(task.targets)
        self._now = 0.0
        self._rtt, self._bandwidth = task.rtt, task.bandwidth
        self._started = False
        self._linked = task.linked
        self._ended = False  # all targets are known
        self._finished = False
        self._progress = False  # since the last wake
        self._silent_wakes = 0
        self._idle_wakes = 0
        self._tally = AggregateStats()
        self._epoch = task.epoch
        self._meet_peer()

    def _meet_peer(self) -> None:
        """Nothing is known of the peer (any more)."""
        self._paths.forget_peer_ids()
        self._shipping = DraftExchange(
            self._task.side, self._rule, self._task.vocab_size, self._paths, backed=self._growth.derivable_by_peer
        )
        self._weighing.reset_peer()
        self._turn = 0  # hand-overs so far
        self._since = 0  # the holder decides from this position on
        self._told = len(self._targets)  # targets the peer has been sent, by this side or by itself
        self._early: dict[int, Targets] = {}  # targets that came before the ones they follow
        self._wanted: set[tuple[int, int]] = set()  # nodes and levels that were asked for
        self._burst: list[PrefixNode] = []  # computed and not shipped yet
        self._told_pace: Speed | None = None
        self._undecided: tuple[PrefixNode, bool, int] | None = None  # what was known when the rule last had no answer
        self._shipped_all = False  # since the last wake
        self._placement = Placement(FIRST_HOLDER, fixed=self._pinned_side)

    # ---- events -----------------------------------------------------------------------------------------------------
    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started(now):
                self._started, self._now = True, now
                opening = (
                    [OpenPeer(tuple(self._targets), self._epoch)] if self._task.faces_client and self._linked else []
                )
                return [Retrieve(), *opening, WakeAt(now + WAKE_INTERVAL)]
            case Retrieved(branches, room):
                effects = self._decoder.start(branches, self._targets, self._paths.head, room)
                if self._forecast is not None:
                    self._forecast.start(branches, self._targets)
                return [*effects, *self._tell_weight(), *self._advance()]
            case Scored(ticket, dists, now):
                self._now = max(self._now, now)
                return self._scored(self._decoder.scored(ticket, dists, self._now))
            case Received(message, now):
                self._now, self._silent_wakes = max(self._now, now), 0
                return self._received(message) if self._linked and message.epoch == self._epoch else []
            case TimerFired(now, rtt, bandwidth):
                self._now, self._rtt, self._bandwidth = now, self._rtt if rtt is None else rtt, bandwidth
                return [*self._woke(), WakeAt(now + WAKE_INTERVAL)]
            case LinkLost():
                return self._lost()
            case LinkBack():
                return self._back()
            case Cancelled(reason):
                return [self._finish(reason)]

    def _scored(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        if not nodes:
            return []  # other branches are still under way
        if self._decoder.timed is not None:
            rows, seconds = self._decoder.timed
            self._profile.add(nodes[0].position, rows, seconds)
        effects = self._ship(nodes) if self._linked else []
        return [*effects, *self._advance()]

    def _received(self, message: SessionMessage) -> list[Effect]:
        match message:
            case Drafts():
                self._shipping.receive(message)
            case EvidenceWeight(log_weight=log_weight):
                self._weighing.receive(log_weight)
            case Targets():
                return self._follow(message)
            case DetailRequest(node=node, level=level):
                if self._may_ship:
                    return [Send(answer) for answer in self._shipping.refine(node, level, self._epoch)]
            case Handover():
                return self._take_over(message)
            case SpeedReport(decode_s=decode_s, row_s=row_s):
                self._placement.observe_speed(other(self._task.side), Speed(decode_s, row_s))
            case SyncState():
                return self._resend(message)
        return self._advance()

    def _woke(self) -> list[Effect]:
        """Nothing came or went for a while: say what is here, so that the peer can send again what was lost."""
        self._shipped_all = False
        if not self._linked or self._progress:
            self._progress = False
            return []
        self._silent_wakes += 1
        self._idle_wakes += self._decoder.idle
        if self._task.faces_client and (self._silent_wakes >= PATIENCE or self._idle_wakes >= STALL):
            return [ClosePeer()]
        self._wanted.clear()
        return [Send(self._have()), *self._ask_for_more()]

    def _lost(self) -> list[Effect]:
        if not self._task.faces_client:
            return [self._finish("cancelled")]
        self._linked = False
        self._meet_peer()
        return self._advance()

    def _back(self) -> list[Effect]:
        """Take the peer in again from the last target on; until it answers, nothing is decided."""
        if self._linked or not self._task.faces_client:
            return []
        self._linked, self._silent_wakes, self._idle_wakes = True, 0, 0
        if not self._started:
            return []  # `Started` will open the session
        self._epoch += 1
        self._meet_peer()
        opening = OpenPeer(tuple(self._targets), self._epoch)
        shipped = self._ship_all() if self._ships else []
        return [opening, *self._tell_weight(), *shipped, *self._advance()]

    # ---- both -------------------------------------------------------------------------------------------------------
    @property
    def _holder(self) -> Side:
        return FIRST_HOLDER if self._turn % 2 == 0 else other(FIRST_HOLDER)

    @property
    def _decides(self) -> bool:
        return self._holder == self._task.side

    @property
    def _ships(self) -> bool:
        """Does the peer get what this side computes?

        A side that decides needs not say it; but with trees the other verifies several of its drafts in one forward.
        """
        if not self._decides:
            return self._may_ship
        is_private = self._task.private and self._task.side == "device"
        return self._may_ship and not is_private and self._options.drafting.rows > 1

    @property
    def _may_ship(self) -> bool:
        """What this side computes may leave it."""
        return self._pinned_side != self._task.side

    def _advance(self) -> list[Effect]:
        """Do all that can be done with what is known."""
        effects: list[Effect] = []
        if self._forecast is not None and len(self._targets) > len(self._task.targets):
            self._forecast.read()  # not sooner: the first token would wait for it
        while not self._ended and (decided := self._decide()) is not None:
            effects += decided
        if self._ended:
            return [*effects, *self._tell(), *self._end()]
        if not (self._task.faces_client or self._decoder.fits(len(self._targets))):
            return [*effects, *self._tell(), self._finish("length")]  # its context has ended, the answer has not
        effects += [*self._tell(), *self._ask_for_more(), *self._hand_over()]
        return [*effects, *self._ship_held(), *self._compute()]

    def _decide(self) -> list[Effect] | None:
        if not self._linked:
            return None if self._task.waits_for_peer else self._decide_alone()
        return self._decide_together() if self._decides else None

    def _decide_alone(self) -> list[Effect] | None:
        dist = self._paths.head.own_dist
        if dist is None:
            return None
        self._tally.alone += 1
        final = filter_top(dist, self._task.sampling)
        lane = 0 if self._decoder.log_evidence is None else LANES.index(self._task.side)
        return self._target(sample(final, self._task.sampling, len(self._targets)), lane, final)

    def _decide_together(self) -> list[Effect] | None:
        """One target from both sides' laws, as soon as every side that has a say is heard."""
        head = self._paths.head
        weights = self._weighing.at(head)
        if weights is None or len(self._targets) < self._since:
            return None
        known = head, head.own_dist is not None, -1 if head.peer_dist is None else head.peer_dist.level
        if known == self._undecided:
            return None
        decision = self._rule.decide(self._task.side, head.own_dist, head.peer_dist, weights, head.position)
        if decision is None:
            self._undecided = known
            return None
        lane = LANES.index(decision.lane) if self._weighing.has_documents else 0
        return self._target(decision.token, lane, decision.dist)

    def _target(self, token: int, lane: int, final: Dist | None) -> list[Effect]:
        """The next target is known: keep it, and let the client have it if this side faces one."""
        self._progress, self._idle_wakes = True, 0
        if self._linked:
            self._count(token)
        self._growth.observe_target(self._paths.head, token)
        if self._forecast is not None:
            self._forecast.decided(self._paths.head, token)
        self._paths.advance(token)
        self._targets.append(token)
        self._lanes.append(lane)
        if len(self._targets) % TIDY == 0:
            self._shipping.forget_dead()
        stops = token in self._task.eos_ids
        self._ended = stops or len(self._targets) >= self._task.max_tokens
        return [Emit(token, final, LANES[lane])] if self._task.faces_client and not stops else []

    def _count(self, token: int) -> None:
        """Whose drafts stood: for the report, and for placement."""
        self._tally.target(token, self._growth.first_guesses(self._paths.head), self._holder)
        if self._options.drafting.ahead:  # else nothing is ever drafted, and both places are alike
            self._placement.observe_target(self._growth.was_drafted(self._paths.head, token))

    def _compute(self) -> list[Effect]:
        """The next forward: rows of targets that are missing, and as many drafts as pay for themselves."""
        if not self._decoder.idle:
            return []
        head = self._paths.head
        effects = self._decoder.commit_to(head)
        room = self._decoder.room
        limit = self._task.max_tokens if room is None else min(self._task.max_tokens, room + 1)
        delay = self._rtt or 0.0 if self._ships else 0.0
        picked = self._growth.select(head, self._seconds, delay, limit, alone=not self._linked)
        behind = self._decoder.missing_rows(head)
        if nodes := [*behind, *[node for node in picked if node is not head][: self._decoder.spare_rows(behind)]]:
            return [*effects, *self._decoder.append_rows(nodes, head, self._now)]
        burst, self._burst = self._burst, []
        return [*effects, *self._ship_now(burst)]

    def _seconds(self, rows: int) -> float:
        """What a forward of so many rows costs: its time, and that of its laws on a link that is full."""
        node_bytes = self._shipping.node_bytes.value
        shipped = 0.0
        if self._ships and self._bandwidth is not None and node_bytes is not None:
            shipped = rows * node_bytes / self._bandwidth
        return self._profile.forward.at(rows) + shipped

    def _end(self) -> list[Effect]:
        """All targets are known. The side that faces the client finishes; the other waits to be closed."""
        if not self._task.faces_client:
            return []
        stopped = self._targets[-1] in self._task.eos_ids if self._targets else False
        return [self._finish("stop" if stopped else "length")]

    def _finish(self, reason: FinishReason) -> Finish:
        self._finished = True
        return Finish(reason, self._tally.stats(self._decoder))

    # ---- the side that decides --------------------------------------------------------------------------------------
    def _tell(self) -> list[Effect]:
        if not (self._decides and self._linked) or self._told >= len(self._targets):
            return []
        message = self._targets_message(self._told)
        self._told = len(self._targets)
        return [Send(message)]

    def _targets_message(self, start: int) -> Targets:
        lanes = b"" if self._task.faces_client else bytes(self._lanes[start:])
        return Targets(0, self._epoch, start, self._targets[start:], lanes)

    def _ask_for_more(self) -> list[Effect]:
        """Where what the peer has shipped does not settle the choice (specs 7.3)."""
        head, weights = self._paths.head, self._weighing.at(self._paths.head)
        if not (self._decides and self._linked) or weights is None or len(self._targets) < self._since:
            return []
        if head.peer_dist is None or head.peer_id is None or (head.own_dist is None and weights[self._task.side] > 0.0):
            return []
        asked = head.peer_id, head.peer_dist.level + 1
        if head.peer_dist.head is None or asked[1] > LAST_LEVEL or asked in self._wanted:
            return []
        self._wanted.add(asked)
        return [Send(DetailRequest(0, self._epoch, *asked))]

    def _hand_over(self) -> list[Effect]:
        """Let the other side decide where that is faster."""
        if not (self._decides and self._linked and self._weighing.peer_known) or self._rtt is None:
            return []
        self._placement.observe_speed(self._task.side, self._speed())
        self._placement.observe_round_trip(self._rtt)
        if self._placement.choose(len(self._targets)) == self._task.side:
            return []
        self._turn, self._since = self._turn + 1, len(self._targets)
        self._placement.moved(self._holder, self._since)
        self._tally.handovers += 1
        return [Send(self._handover_message()), *self._ship_all()]

    def _handover_message(self) -> Handover:
        return Handover(0, self._epoch, self._turn, self._since)

    # ---- the side that follows --------------------------------------------------------------------------------------
    def _tell_weight(self) -> list[Effect]:
        if not (self._linked and self._decoder.started and self._may_ship):
            return []
        return [Send(EvidenceWeight(0, self._epoch, self._decoder.log_evidence))]

    def _ship(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        if self._options.drafting.whole_sequences:
            self._burst += nodes
            return []
        return self._ship_now(nodes)

    def _ship_now(self, nodes: Sequence[PrefixNode]) -> list[Effect]:
        if not nodes or not self._linked or not self._ships:
            return []
        return [*self._tell_pace(), *(Send(message) for message in self._shipping.encode(nodes, self._epoch))]

    def _ship_held(self) -> list[Effect]:
        """What a target or the peer has led to since it was computed."""
        if not (self._shipping.withholds and self._linked and self._ships):
            return []
        messages = self._shipping.encode((), self._epoch)
        self._burst = [node for node in self._burst if node.own_id is None]
        return [Send(message) for message in messages]

    def _ship_all(self) -> list[Effect]:
        if not self._may_ship:
            return []
        self._burst = []
        return [*self._tell_pace(), *(Send(message) for message in self._shipping.encode_all(self._epoch))]

    def _tell_pace(self) -> list[Effect]:
        """Once it is known, and when it has changed; nobody asks where the decision cannot move."""
        speed, told = self._speed(), self._told_pace
        if self._pinned_side is not None or self._decoder.timed is None:
            return []
        if told is not None and abs(speed.decode_s - told.decode_s) <= TELL_PACE * told.decode_s:
            return []
        self._told_pace = speed
        return [Send(SpeedReport(0, self._epoch, speed.decode_s, speed.row_s))]

    def _speed(self) -> Speed:
        return self._profile.forward.speed()

    def _take_over(self, message: Handover) -> list[Effect]:
        """The peer lets this side decide. Known already, or not its to say: ignored."""
        if not self._decides and message.turn == self._turn + 1 and self._may_hold:
            self._turn, self._since = message.turn, message.start
            self._told = max(message.start, len(self._targets))
            self._placement.moved(self._task.side, message.start)
        return self._advance()

    @property
    def _may_hold(self) -> bool:
        return self._pinned_side in (None, self._task.side)

    def _follow(self, message: Targets) -> list[Effect]:
        """Take the targets that are new; those that come too early wait for the ones they follow."""
        if (
            any(token >= self._task.vocab_size for token in message.tokens)
            or message.start + len(message.tokens) > self._task.max_tokens
        ):
            return []  # as good as lost
        waits = message.start > len(self._targets)
        too_many = len(self._early) >= MAX_EARLY or len(message.tokens) > MAX_EARLY
        if not (waits and too_many):
            kept = self._early.get(message.start)
            if kept is None or len(kept.tokens) <= len(message.tokens):
                self._early[message.start] = message
        effects: list[Effect] = []
        while not self._ended and (ready := min(self._early, default=len(self._targets) + 1)) <= len(self._targets):
            effects += self._apply(self._early.pop(ready))
        return effects + self._advance()

    def _apply(self, message: Targets) -> list[Effect]:
        effects: list[Effect] = []
        lanes = message.lanes or bytes(len(message.tokens))
        fresh = slice(len(self._targets) - message.start, None)
        for token, lane in zip(message.tokens[fresh], lanes[fresh], strict=True):
            if self._ended or (self._decides and len(self._targets) >= self._since):
                break  # from there on nobody but this side decides
            effects += self._target(token, lane if lane < len(LANES) else 0, None)
            self._told = max(self._told, len(self._targets))
        return effects

    # ---- after a loss of messages, which a link does not have but a link that breaks and heals does -----------------
    def _have(self) -> SyncState:
        waits = (
            self._decides and not self._ended and (not self._weighing.peer_known or self._paths.head.peer_dist is None)
        )
        return SyncState(0, self._epoch, self._turn, len(self._targets), waits)

    def _resend(self, have: SyncState) -> list[Effect]:
        """Send what the peer lacks; ask, where it has more than this side."""
        effects: list[Effect] = []
        if have.turn < self._turn and not self._decides:
            effects.append(Send(self._handover_message()))
        if have.targets < len(self._targets):
            effects.append(Send(self._targets_message(have.targets)))
        if have.turn > self._turn or have.targets > len(self._targets):
            effects.append(Send(self._have()))
        if have.waits and not self._decides and not self._shipped_all:
            self._shipped_all = True
            effects += [*self._tell_weight(), *self._ship_all()]
        return effects + self._advance()


aggregate = Strategy(
    name="aggregate",
    summary="device and cloud each read their own documents; their predictions are mixed token by token",
    machine=Aggregate,
    participants="both sides",
    text_of="both",
    options=AggregateOptions,
    messages=STRATEGY_MESSAGES,
    privacy_levels=JOINT_LEVELS,
    check=check,
    choose=choose,
    accepts=accepts,
)
