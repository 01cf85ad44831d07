"""Helpers of the engine tests: scoring from scratch, random prompts and trees, and a tree that grows and is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from paceline.core.batching.segment import ROOT, Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from tests.core.dists import total_variation

TOLERANCE = 2e-4  # total variation: float32 sums in another order

_ids = itertools.count(1_000_000)


@contextmanager
def sequences(engine: Engine, count: int = 1) -> Iterator[list[SeqId]]:
    """Fresh sequences, released afterwards; then the engine must have as many free rows as before."""
    free = engine.free_rows()
    seqs = [SeqId(next(_ids)) for _ in range(count)]
    try:
        yield seqs
    finally:
        for seq in seqs:
            engine.release(seq)
    engine.check()
    assert engine.free_rows() == free


def extend(
    engine: Engine,
    seq: SeqId,
    tokens: Sequence[int],
    *,
    parents: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
) -> tuple[Dist, ...]:
    """Append to one sequence and score all new rows."""
    tree = None if parents is None else tuple(parents)
    names = None if ids is None else tuple(ids)
    segment = Segment(seq, engine.length(seq), tuple(tokens), tree, "all", names)
    return engine.forward(Batch((segment,))).dists[0]


def scratch(engine: Engine, tokens: Sequence[int]) -> tuple[Dist, ...]:
    """Distribution after each token, in one prefill of a fresh sequence."""
    with sequences(engine) as (seq,):
        return extend(engine, seq, tokens)


def assert_same(found: Sequence[Dist], expected: Sequence[Dist]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert np.isfinite(a.probs).all()
        assert total_variation(a, b) <= TOLERANCE, (i, total_variation(a, b))


def path(parents: Sequence[int], row: int) -> list[int]:
    """Rows from a root of the tree to `row`."""
    rows = [row]
    while parents[rows[0]] >= 0:
        rows.insert(0, parents[rows[0]])
    return rows


def along_paths(
    engine: Engine, prompt: Sequence[int], tokens: Sequence[int], parents: Sequence[int], rows: Sequence[int]
) -> list[Dist]:
    """Distributions after the chain along each row's path, in one prefill for all rows of a chain."""
    found: dict[int, Dist] = {}
    for row in reversed(rows):
        if row not in found:
            chain = path(parents, row)
            scored = scratch(engine, [*prompt, *(tokens[i] for i in chain)])
            found |= zip(chain, scored[len(prompt) :], strict=True)
    return [found[row] for row in rows]


def prompts(least: int = 1, most: int = 30) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 96), min_size=least, max_size=most)


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> tuple[list[int], list[int]]:
    """(tokens, parents)"""
    tokens = draw(prompts(1, most))
    return tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))]


@dataclass
class Growing:
    """A sequence with its expected content. Every scored row is compared with the chain along its path."""

    engine: Engine
    seq: SeqId
    committed: list[int] = field(default_factory=list)  # tokens
    tokens: list[int] = field(default_factory=list)  # of the open tree
    parents: list[int] = field(default_factory=list)  # rows
    ids: list[int] = field(default_factory=list)
    next_id: int = 0

    def extend(self, tokens: list[int]) -> None:
        """Append a chain; no tree may be open."""
        found = extend(self.engine, self.seq, tokens)
        self.committed += tokens
        assert_same(found, scratch(self.engine, self.committed)[-len(tokens) :])
        self._check()

    def grow(self, tokens: list[int], parents: list[int]) -> None:
        """Append rows to the open tree. parents: row indices in the tree, new rows included, or -1."""
        ids = [self.next_id + 2 * row for row in range(len(tokens))]
        self.next_id = ids[-1] + 1
        self.ids += ids
        self.tokens += tokens
        self.parents += parents
        names = [self.ids[parent] if parent >= 0 else ROOT for parent in parents]
        found = extend(self.engine, self.seq, tokens, parents=names, ids=ids)
        new = range(len(self.tokens) - len(tokens), len(self.tokens))
        assert_same(found, along_paths(self.engine, self.committed, self.tokens, self.parents, new))
        self._check()

    def prune(self, keep: list[int], rest: list[int]) -> None:
        """Rows are indices in the tree."""
        self.engine.prune(self.seq, [self.ids[row] for row in keep], [self.ids[row] for row in rest])
        index = {keep[-1] if keep else -1: -1} | {row: i for i, row in enumerate(rest)}
        self.committed += [self.tokens[row] for row in keep]
        self.parents = [index[self.parents[row]] for row in rest]
        self.tokens = [self.tokens[row] for row in rest]
        self.ids = [self.ids[row] for row in rest]
        self._check()

    def truncate(self, length: int) -> None:
        self.engine.truncate(self.seq, length)
        self.committed, self.tokens, self.parents = self.committed[:length], [], []
        self.ids = []
        self._check()

    def play(self, data: st.DataObject, moves: int) -> None:
        """Random valid moves."""
        for _ in range(moves):
            kinds = ["grow", "grow", "prune", "truncate"] if self.tokens else ["grow", "grow", "extend", "truncate"]
            match data.draw(st.sampled_from(kinds)):
                case "grow":
                    self._grow(data)
                case "extend":
                    self.extend(data.draw(prompts(1, 4)))
                case "prune":
                    self._prune(data)
                case _:
                    self.truncate(data.draw(st.integers(max(0, len(self.committed) - 3), len(self.committed))))

    def _grow(self, data: st.DataObject) -> None:
        tokens, size = data.draw(prompts(1, 4)), len(self.tokens)
        self.grow(tokens, [data.draw(st.integers(-1, size + i - 1)) for i in range(len(tokens))])

    def _prune(self, data: st.DataObject) -> None:
        end = data.draw(st.integers(-1, len(self.tokens) - 1))
        rest: list[int] = []
        for row, parent in enumerate(self.parents):
            if (parent == end or parent in rest) and data.draw(st.booleans()):
                rest.append(row)
        self.prune(path(self.parents, end) if end >= 0 else [], rest)

    def _check(self) -> None:
        self.engine.check()
        assert self.engine.length(self.seq) == len(self.committed) + len(self.tokens)
