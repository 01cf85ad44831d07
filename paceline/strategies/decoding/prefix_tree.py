"""The tree of continuations that one side knows of: what it has computed, what it received, and the path of targets.

A node stands for a prefix: the output tokens on its path. A side's distribution after a prefix depends on that prefix
alone, so nothing computed on a path is ever stale: a target moves the head one node down, and nodes that are not below
the new head are dead. Drafts may be merged into it, with estimates of P(accepted | the head) as their scores: no node
scores above its parent, so the order by falling score, equals by age, is topological.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, Protocol

from paceline.core.aggregation.aggregators import OwnDist, PeerDist
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.drafting.ngram_drafter import Context, DraftTree, NgramDrafter
from paceline.core.sampling.dist import Dist
from paceline.strategies.base import Branch, MachineConfig

MAX_LIVE_NODES = 512  # the head and below; more are not added for the peer
KEPT_POSITIONS = 256  # decided nodes that can still be found by position
LEAST_SCORE: Final = 1e-12  # one below is one that a drafter has rounded to nothing


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Drafts of one side after a prefix, best first, and the class of the first one's margin
    (`core.drafting.ngram_drafter`).
    """

    tokens: tuple[int, ...]
    margin_class: int


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The prefix that ends with `token`; `position` output tokens long, so its distribution is that of output
    `position`.
    """

    token: int
    position: int
    parent: PrefixNode | None
    own_dist: OwnDist | None = None  # this side's distribution after the prefix, mixed over its documents
    plain: Dist | None = None  # the same before any processing, where logprobs are wanted
    raw_head: Dist | None = None  # head of that, where an n-gram table learns from it
    sampled: int | None = None  # the token that this side alone would decide here, where the engine samples
    decided_by: frozenset[int] | None = None  # of that token: branches of this side, where not all alike
    branch_dists: tuple[Dist, ...] = ()  # heads of each document's, where scores follow the text
    evidence: tuple[float, ...] | None = None  # what the text so far adds to the score of each document
    weigh: Callable[[PrefixNode], float] | None = None  # of `branch_dists`, for `log_evidence`
    peer_dist: PeerDist | None = None  # as received
    dead: bool = False  # the targets have gone another way
    score: float = 1.0  # of a draft: estimated probability that it is accepted, given the head; 1 for the head
    number: int = 0  # of a draft: rises with its creation
    row: int | None = None  # id of its row in this side's open tree of KV rows
    cached: bool = False  # its row is in the KV cache
    alive: bool = True  # the head, or below it
    own_id: int | None = None  # id under which this side sent it
    peer_id: int | None = None  # id under which the peer sent it
    sent_choice: int | None = None  # this side's choice after the prefix, as it was sent
    own_drafts: DraftTokens | None = None
    peer_drafts: DraftTokens | None = None
    predicted: int | None = None  # the token that would be the target here, where what is known determines it
    predicted_from: tuple[bool, int] | None = None  # what was known when `predicted` was last computed
    children: dict[int, PrefixNode] = field(default_factory=dict)
    _log_evidence: float | None = field(default=None, init=False)

    @property
    def log_evidence(self) -> float | None:
        """log h of this side after the prefix, where scores follow the text; computed when it is first asked for."""
        if self._log_evidence is None and self.weigh is not None and self.branch_dists:
            self._log_evidence = self.weigh(self)
        return self._log_evidence

    def child(self, token: int) -> PrefixNode:
        """The node one token further, made if need be."""
        found = self.children.get(token)
        if found is None:
            found = self.children[token] = PrefixNode(token, self.position + 1, self, alive=self.alive)
        return found

    def set_peer(self, share: PeerDist, node_id: int) -> None:
        """Set the peer's distribution; one already here is replaced only by one in more detail."""
        self.peer_id = node_id
        if self.peer_dist is None or share.level > self.peer_dist.level:
            self.peer_dist, self.peer_drafts = share, None

    @property
    def peer_choice(self) -> int | None:
        """The choice that the peer has sent after the prefix; None: it has sent none, or a distribution."""
        return None if self.peer_dist is None or self.peer_dist.head is not None else self.peer_dist.token

    def path_below(self, length: int) -> list[PrefixNode]:
        """The nodes from the prefix of so many output tokens to this one, which is the last."""
        nodes: list[PrefixNode] = []
        above: PrefixNode | None = self
        while above is not None and above.position > length:
            nodes.append(above)
            above = above.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[PrefixNode]:
        """This node and all under it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class PrefixTree:
    """`head` is the node of all targets. Nodes on the path to it keep their place but lose their distributions."""

    def __init__(self, position: int) -> None:
        """position: output tokens already decided."""
        self.head = PrefixNode(-1, position, None)
        self._decided: dict[int, PrefixNode] = {position: self.head}
        self._drafts = 0  # added

    # ---- drafts -----------------------------------------------------------------------------------------------------
    @property
    def waiting(self) -> list[PrefixNode]:
        """The head and drafts below it, as far as they have no row; parents first."""
        return [node for node in self.head.subtree() if not node.cached]

    @property
    def num_sent(self) -> int:
        """The head and drafts below it that have a row."""
        return sum(node.cached for node in self.head.subtree())

    def best(self, count: int) -> list[PrefixNode]:
        """The first waiting nodes, by falling score. Parents come first."""
        return sorted(self.waiting, key=lambda node: (-node.score, node.number))[:count]

    def add(self, parent: PrefixNode, token: int, score: float) -> PrefixNode:
        """One draft more, with a score of at most the parent's."""
        assert parent.alive and token not in parent.children
        node = parent.child(token)
        self._drafts += 1
        node.number, node.score = self._drafts, min(max(score, LEAST_SCORE), parent.score)
        return node

    def merge(
        self, drafted: DraftTree, admits: Callable[[PrefixNode, int], bool] = lambda _, __: True
    ) -> list[PrefixNode]:
        """Add what is new of a tree drafted below the head, by its paths of tokens; returns the new nodes.

        Nodes that are there keep their place and rows, and take the new score. admits: a child of this node with this
        token may be added; without it none of its drafted subtree is.
        """
        place: dict[int, PrefixNode] = {-1: self.head}
        added: list[PrefixNode] = []
        for index, (token, above, prob) in enumerate(zip(drafted.tokens, drafted.parents, drafted.probs, strict=True)):
            parent = place.get(above)
            if parent is None:
                continue
            node = parent.children.get(token)
            if node is None:
                if not admits(parent, token):
                    continue
                node = self.add(parent, token, parent.score)
                added.append(node)
            node.score = max(prob, LEAST_SCORE)
            place[index] = node
        for node in self.head.subtree():
            for child in node.children.values():
                child.score = min(child.score, node.score)
        return added

    def drop(self, draft: PrefixNode) -> None:
        """Drop a draft without a row, and what hangs below it."""
        assert draft.parent is not None and not draft.cached
        del draft.parent.children[draft.token]
        for node in list(draft.subtree()):
            node.alive = False
            node.children.clear()

    def drop_waiting(self) -> None:
        """Drop all drafts without a row; the head stays."""
        for node in self.waiting:
            if node is not self.head and node.alive:
                self.drop(node)

    # ---- targets ----------------------------------------------------------------------------------------------------
    def advance(self, token: int) -> PrefixNode:
        """Move the head to the next target. Everything that does not hang below it dies, and scores are given it."""
        before = self.head
        self.head = before.child(token)
        if (share := self.head.score) < 1.0:
            for node in self.head.subtree():
                node.score = min(1.0, node.score / share)
        for sibling in before.children.values():
            if sibling is not self.head:
                for node in list(sibling.subtree()):
                    node.alive, node.dead = False, True
                    node.own_dist = node.plain = node.peer_dist = None  # a megabyte for a large vocabulary
                    node.branch_dists = ()
                    node.children.clear()
        # Decided nodes refer to their parents alone: each answer would leave the garbage collector a thousand cycles.
        before.alive = False
        before.children.clear()
        before.own_dist = before.plain = before.raw_head = before.peer_dist = None
        before.own_drafts = before.peer_drafts = None
        if self.head.evidence is not None:
            before.branch_dists = ()
        self._decided[self.head.position] = self.head
        self._decided.pop(self.head.position - KEPT_POSITIONS, None)
        return self.head

    def decided(self, position: int) -> PrefixNode | None:
        """The node of the first `position` targets; None when they are not known here (any more, or yet)."""
        return self._decided.get(position)

    def find(self, parent: PrefixNode, token: int) -> PrefixNode | None:
        """The child of that token, if any. Above the head only decided nodes are found, below a dead one none."""
        if parent.alive:
            return parent.children.get(token)
        child = self._decided.get(parent.position + 1)
        return child if child is not None and child.parent is parent and child.token == token else None

    def full(self) -> bool:
        return sum(1 for _ in self.head.subtree()) >= MAX_LIVE_NODES

    def forget_peer_ids(self) -> None:
        """Forget everything received from the peer, and which nodes were sent to it."""
        for node in self.head.subtree():
            node.peer_dist = node.peer_drafts = node.peer_id = node.own_id = node.sent_choice = None
            node.predicted = node.predicted_from = None


# What the drafter of one answer has yet to read and to learn: done in slices, while a forward runs.
#
# Each slice is short, because the answers of a process share its event loop. Tokens are observed in their order;
# lessons, the target's distributions after tokens, come after all tokens before them.


SLICE_TOKENS: Final = 64  # observed before others on the event loop have their turn, by all answers together
SLICE_PROBS: Final = 1 << 16  # probabilities read likewise, where rows are distributions
STEP_PROBS: Final = 1 << 19  # probabilities read for the lessons of one engine step, where rows are distributions
PAUSED_ROWS: Final = 1 / 4  # rows of an engine step that are learnt from, while drafting is paused
MAX_LEARNT_ROWS: Final = 32  # of one answer's step
MAX_UNOBSERVED_TOKENS: Final = 4  # of output: the drafter observes more than these even if no draft needs them
MAX_LATE_TOKENS: Final = 64  # observed before a forward for its drafts; more wait for the next forward
PROMPT_END: Final = 4  # tokens of a prompt that are remembered with the answer, which begins behind them
MAX_BACKLOG: Final = 4096  # tokens that a rest leaves to observe, by all answers together; earlier ones are skipped

Lesson = Callable[[], None]


class TreeDrafter(Protocol):
    """Drafts trees. `core.drafting.ngram_drafter.NgramDrafter` is one."""

    def read(self, tokens: Iterable[int]) -> None:
        """Learn from a whole text that the answer does not continue."""

    def observe(self, token: int) -> None:
        """Append the next token of prompt or output."""

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """Record the target's distribution after a row that held `token`, below a row that held `before`."""

    def draft(self, budget: int, position: int) -> DraftTree:
        """At most `budget` nodes below the last observed token, best first. position: of the next output token."""


class DrafterFeed:
    """The drafter of an answer, fed in short slices, while a forward runs.

    Texts are separate ones, of which the answer continues the last.
    """

    def __init__(self, config: MachineConfig, drafter: TreeDrafter | None = None) -> None:
        """drafter: in place of the served one, which drafts from look-up tables and the text."""
        output, means, samples = config.output, config.means, config.takes_tokens  # else rows take longer to read
        stats = OnlineStats() if means.stats is None else means.stats
        table = LookupTable(output.vocab_size) if means.table is None else means.table
        self.drafter: TreeDrafter = drafter or NgramDrafter(
            table, output.sampling, eos_ids=output.eos_ids, stats=stats.drafter, predicted=means.predicted
        )
        self._table, self._memories = table, table.memories
        self._written: list[int] = []  # the prompt's last tokens, and the output
        self.rows_per_step = MAX_LEARNT_ROWS if samples else STEP_PROBS / output.vocab_size  # of all answers together
        self._rows_per_slice = MAX_LEARNT_ROWS if samples else max(1, SLICE_PROBS // output.vocab_size)
        self._others: list[tuple[int, ...]] = []  # texts to read before the one that the answer continues
        self._tokens: list[int] = []  # to observe
        self._lessons: list[Lesson] = []
        self._learnable_rows = 0.0  # allowance that grows with every step
        self._last_two: tuple[int | None, int] = None, 0  # tokens before the output

    @property
    def backlog(self) -> int:
        """Tokens that are yet to be observed."""
        return len(self._tokens) + sum(map(len, self._others))

    @property
    def is_due(self) -> bool:
        """There is something to do while the next forward runs."""
        return bool(self._lessons) or self.backlog >= MAX_UNOBSERVED_TOKENS or self._is_behind

    # ---- input ------------------------------------------------------------------------------------------------------
    def begin(self, branches: Sequence[Branch], targets: Sequence[int]) -> None:
        """The prompts; the answer continues the last one, and begins with these tokens."""
        self._others = [branch.prompt for branch in branches[:-1]]
        text = (*branches[-1].prompt, *targets)
        self._tokens = list(text)
        self._written = list(text[-PROMPT_END:])
        self._last_two = text[-2] if len(text) > 1 else None, text[-1] if text else 0

    def append(self, tokens: Iterable[int]) -> None:
        """Tokens of the output."""
        known = list(tokens)
        self._tokens += known
        self._written += known

    def remember(self) -> None:
        """Keep the text for later answers of its owner. The answer is over."""
        if self._table.texts is not None and len(self._written) > PROMPT_END:
            self._table.texts.add(self._written)
        self._written = []

    def teach(self, lessons: Sequence[Lesson]) -> None:
        """Add lessons; of many that wait the latest are kept."""
        if lessons:
            self._lessons = [*self._lessons, *lessons][-2 * MAX_LEARNT_ROWS :]

    def rest(self, sequences: int) -> None:
        """Nothing is drafted for now: forget the lessons, and all tokens but the last that fit the backlog."""
        self._lessons.clear()
        most = max(1, MAX_BACKLOG // max(1, sequences))
        if self.backlog > 2 * most:
            del self._tokens[:-most]
            self._others = [()]  # ends the text before the gap

    # ---- work -------------------------------------------------------------------------------------------------------
    def slice(self, sequences: int) -> bool:
        """Observe some tokens, then learn some lessons. Returns True if anything is left."""
        self.catch_up(max(1, SLICE_TOKENS // max(1, sequences)))
        if not self.backlog:
            self._learn(self._rows_per_slice)
            for memory in self._memories:
                memory.catch_up(SLICE_TOKENS // max(1, sequences))
        return bool(self._lessons) or self.backlog > 0 or self._is_behind

    @property
    def _is_behind(self) -> bool:
        return any(memory.is_behind for memory in self._memories)

    def catch_up(self, max_tokens: int | None = None) -> None:
        """Let the drafter observe the tokens that wait, or the first of them."""
        left = self.backlog if max_tokens is None else max_tokens
        while self._others and left > 0:
            left -= len(self._others[0])
            self.drafter.read(self._others.pop(0))
        if left > 0:
            for token in islice(self._tokens, left):
                self.drafter.observe(token)
            del self._tokens[:left]

    @property
    def is_current(self) -> bool:
        """The drafter has read the whole text; it does so now if little is left."""
        if self.backlog > MAX_LATE_TOKENS:
            return False
        self.catch_up()
        return True

    def finish(self) -> None:
        """Do everything that waits."""
        if self._lessons:
            self.catch_up()
            self._learn(None)

    def _learn(self, max_lessons: int | None) -> None:
        lessons, self._lessons = self._lessons[:max_lessons], self._lessons[max_lessons:] if max_lessons else []
        for lesson in lessons:
            lesson()

    # ---- lessons ----------------------------------------------------------------------------------------------------
    def take_rows(
        self,
        rows: Mapping[PrefixNode, Sequence[Dist]],
        head: PrefixNode,
        plain: Callable[[Sequence[Dist]], Dist],
        sequences: int,
        *,
        paused: bool = False,
    ) -> bool:
        """Add lessons from the rows answered last, as many as one of so many answers may learn from in a step: those of
        output overwrite table entries, and come last. Returns True if the next ones may be learnt from."""
        rows_per_step = PAUSED_ROWS if paused else self.rows_per_step
        new_rows = min(rows_per_step, MAX_LEARNT_ROWS / max(1, sequences)) / max(1, sequences)
        self._learnable_rows += new_rows
        if self._learnable_rows >= 1.0:
            self._learnable_rows = min(self._learnable_rows, MAX_LEARNT_ROWS)
            max_rows = int(self._learnable_rows)
            self._learnable_rows -= min(max_rows, len(rows))
            path: list[PrefixNode] = []
            node = head.parent
            while node is not None and node in rows:
                path.append(node)
                node = node.parent
            path = path[:max_rows]
            rejected = [node for node in rows if node not in path][: max_rows - len(path)]
            ordered = [*((node, False) for node in rejected), *((node, True) for node in reversed(path))]

            def learn(before: int | None, token: int, dists: Sequence[Dist], accepted: bool) -> None:
                self.drafter.learn(token, plain(dists), before=before, accepted=accepted)

            self.teach([partial(learn, *self._context(node), rows[node], accepted) for node, accepted in ordered])
        return self._learnable_rows + new_rows >= 1.0

    def prompt_lessons(self, tokens: Sequence[int], dists: Sequence[Dist], sequences: int) -> list[Lesson]:
        """Lessons from the prompt's end, of the forward that prefilled it; of many prompts fewer of each."""
        befores = (None, *tokens)
        lessons: list[Lesson] = [
            partial(self.drafter.learn, token, dist, before=before)
            for before, token, dist in zip(befores, tokens, dists, strict=False)
        ]
        max_rows = int(min(MAX_LEARNT_ROWS, self.rows_per_step)) // max(1, sequences)
        return lessons[-max_rows:] if max_rows else []

    def _context(self, node: PrefixNode) -> tuple[int | None, int]:
        """The last two tokens of the node's prefix."""
        if node.parent is None:
            return self._last_two
        return self._last_two[1] if node.parent.parent is None else node.parent.token, node.token


# N-gram drafts for tree nodes whose distribution is not known yet (`core.drafting.ngram_drafter`).
#
# A distribution after a prefix is known only once the prefix has been computed, so from distributions alone a tree
# grows one level a forward. N-gram drafts let a tree go several levels deeper; the strategy decides whether such rows
# pay.


MAX_PROMPT_TOKENS = 2048  # of the end of each prompt, that are read: two microseconds each


class NgramDrafts:
    """Drafts of one side for one answer. Must observe every target in order."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._unread: list[Sequence[int]] = []  # prompts
        self._output: list[int] = []  # output tokens behind the last prompt, while it is unread
        self._last_two: tuple[int | None, int | None] = None, None  # tokens before the head
        self._head: PrefixNode | None = None  # root of `_contexts`
        self._contexts: dict[PrefixNode, Context] = {}

    @staticmethod
    def of(config: MachineConfig, online_stats: OnlineStats) -> NgramDrafts | None:
        """None where nothing is to be drafted, or there are no tables to draft from."""
        if config.means.table is None or config.options.drafting.ahead == 0:
            return None
        table, output = config.means.table, config.output
        return NgramDrafts(NgramDrafter(table, output.sampling, eos_ids=output.eos_ids, stats=online_stats.drafter))

    def start(self, branches: Sequence[Branch], targets: Sequence[int]) -> None:
        """Set the prompts. Nothing is drafted until `read` has been called for each of them."""
        self._unread = [branch.prompt[-MAX_PROMPT_TOKENS:] for branch in branches]
        self._output = list(targets)
        self._last_two = _last_two((*branches[-1].prompt[-2:], *targets))

    def read(self) -> None:
        """Read the next prompt, if any is left. Takes milliseconds: call it when nothing else waits."""
        if not self._unread:
            return
        text = self._unread.pop(0)
        if self._unread:
            self._drafter.read(text)
            return
        for token in (*text, *self._output):
            self._drafter.observe(token)

    def observe_target(self, head: PrefixNode, token: int) -> None:
        """Observe the target after `head`.

        The table learns this side's own distribution there, at temperature 1 and without constraint, since its entries
        outlive the answer and serve others with other sampling. The distribution of both sides together is known only
        after logits processing, if at all.
        """
        before, last = self._last_two
        if last is None:
            return  # the prompts are not known yet: `start` receives this target
        if self._unread:
            self._output.append(token)
        else:
            self._drafter.observe(token)
        self._last_two, self._head = (last, token), None
        if head.raw_head is not None:
            self._drafter.learn(last, head.raw_head, before=before)

    def children(self, node: PrefixNode, head: PrefixNode) -> Sequence[tuple[int, float]]:
        """Tokens that may follow, each with its probability of being the target."""
        if self._unread or self._last_two[1] is None:
            return ()
        if self._head is not head:
            self._head, self._contexts = head, {head: self._drafter.root(head.position)}
        return self._drafter.children(self._context(node))

    def _context(self, node: PrefixNode) -> Context:
        known = self._contexts.get(node)
        if known is None:
            assert node.parent is not None, "below the head"
            known = self._contexts[node] = self._drafter.child(self._context(node.parent), node.token)
        return known


def _last_two(text: Sequence[int]) -> tuple[int | None, int | None]:
    before, last = (None, None, *text)[-2:]
    return before, last
