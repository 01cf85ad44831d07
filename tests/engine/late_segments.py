"""A sender whose segments lag behind its prunes, and what must come of each of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from paceline.core.batching.segment import ROOT, Segment, SeqId

VOCAB = 90


@dataclass
class Node:
    token: int
    parent: int  # id


@dataclass
class Sender:
    """One sequence as its sender sees it, and segments that it has sent and that have not arrived."""

    seq: SeqId
    random: Random
    prompt: tuple[int, ...]
    nodes: dict[int, Node] = field(default_factory=dict)  # every one sent
    path: list[int] = field(default_factory=list)  # ids of the committed rows of the tree
    live: list[int] = field(default_factory=list)  # ids of the open rows
    renewed: bool = False  # the ids might begin anew, so the committed end has no id
    lagging: deque[Segment] = field(default_factory=deque)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.path) + len(self.live)

    def text(self, name: int) -> list[int]:
        """The tokens up to this row."""
        tokens: list[int] = []
        while name != ROOT:
            tokens.append(self.nodes[name].token)
            name = self.nodes[name].parent
        return [*self.prompt, *reversed(tokens)]

    def committed_text(self) -> list[int]:
        return self.text(self.path[-1]) if self.path else list(self.prompt)

    def grow(self) -> None:
        """Send rows below the open ones, or below the committed end, by either of its names."""
        first = max(self.nodes, default=-1) + self.random.randint(1, 3)
        ids = tuple(first + 2 * row for row in range(self.random.randint(1, 5)))
        parents: list[int] = []
        start = self.length
        end = self.path[-1] if self.path else ROOT
        for name in ids:
            below = self.random.choice([end, *self.live])
            self.nodes[name] = Node(self.random.randrange(VOCAB), below)
            parents.append(ROOT if below == end and (self.renewed or self.random.random() < 0.5) else below)
            self.live.append(name)
        tokens = tuple(self.nodes[name].token for name in ids)
        self.lagging.append(Segment(self.seq, start, tokens, tuple(parents), "all", ids))

    def prune(self) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
        """Commit a path, keep some rows below it: its arguments."""
        horizon = max(self.nodes) if self.lagging or self.random.random() < 0.5 else None
        if not self.live:
            return (), (), max(self.nodes)
        keep: list[int] = []
        end = self.path[-1] if self.path else ROOT
        while self.random.random() < 0.7:
            below = [name for name in self.live if self.nodes[name].parent == end]
            if not below:
                break
            end = self.random.choice(below)
            keep.append(end)
        live: list[int] = []
        for name in self.live:
            if (self.nodes[name].parent == end or self.nodes[name].parent in live) and self.random.random() < 0.7:
                live.append(name)
        self.path += keep
        self.live = live
        self.renewed = (self.renewed and not keep) or (horizon is None and not live)
        return tuple(keep), tuple(live), horizon

    def wanted(self, segment: Segment) -> tuple[int, ...]:
        """Rows of the segment that are still of use."""
        return tuple(row for row, name in enumerate(segment.node_ids) if name in self.path or name in self.live)
