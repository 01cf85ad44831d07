"""Preemption on real engines: rows that are computed again score as if they had never been released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import ROOT, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp
from tests.engine.checkpoints import POSITIONS, VOCAB
from tests.engine.trials import assert_same

BRANCHES, ROUNDS, MAX_TREE = 2, 8, 5
CAPACITY = 224  # rows: two or three of nine answers fit
Scores = dict[tuple[int, int, int], tuple[Dist, ...]]  # by answer, branch and round

SUBJECTS = ["fake", "paged-llama"]


def engine_of(subject: str, rows: int | None, checkpoint: Callable[[str], Path]) -> Engine:
    if subject == "fake":
        return FakeEngine(3, max_positions=POSITIONS, capacity_rows=rows)
    name = subject.split("-")[1]
    return load_engine(checkpoint(name), EngineOptions(backend="paged", kv_rows=rows or 4096), name=name)


@dataclass
class Answer:
    """Prompts, then rounds of chains, trees, prunes and truncates, the same on every branch and in every run."""

    number: int
    steps: StepExecutor
    scores: Scores
    seqs: list[SeqId] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    length: int = 0  # committed rows beside the prompt
    parents: tuple[int, ...] = ()  # of the open tree's rows, as rows
    ids: tuple[int, ...] = ()
    round: int = 0
    missing: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.number)
        self.seqs = [SeqId(1 + BRANCHES * self.number + branch) for branch in range(BRANCHES)]
        common = tuple(self.random.randrange(VOCAB) for _ in range(self.random.choice((0, 20))))
        sizes = [self.random.randrange(5, 30) for _ in self.seqs]
        self.prompts = [(*common, *(self.random.randrange(VOCAB) for _ in range(size))) for size in sizes]
        claim = sum(len(prompt) + 3 * ROUNDS + 3 * MAX_TREE + 15 for prompt in self.prompts)
        owner = self.random.choice(("", "another's"))
        self.group = Group(self.number, min(claim, CAPACITY), owner=owner)
        self.salt = self.random.choice((None, "owner", "other"))

    @property
    def ended(self) -> bool:
        return self.round > ROUNDS

    def advance(self) -> None:
        """Ask for the next round, or end."""
        self.round += 1
        if self.ended:
            for seq in self.seqs:
                self.steps.submit(SequenceOp.release(seq))
            return
        if self.round == 1:
            for branch, prompt in enumerate(self.prompts):
                self._ask(branch, Segment(self.seqs[branch], 0, prompt))
            return
        if self.parents and self.random.random() < 0.6:
            self._prune()
        if self.length and self.random.random() < 0.2:
            self.length, self.parents, self.ids = self.random.randrange(self.length), (), ()
            for branch, prompt in enumerate(self.prompts):
                self.steps.submit(SequenceOp.truncate(self.seqs[branch], len(prompt) + self.length))
        self._grow()

    def _grow(self) -> None:
        """A chain of a few rows, or a few more rows of the open tree."""
        num_open = len(self.parents)
        if num_open < 2 * MAX_TREE and (num_open or self.random.random() < 0.6):
            count = self.random.randint(1, MAX_TREE)
            self.parents += tuple(self.random.randrange(-1, num_open + i) for i in range(count))
            self.ids += tuple(range(100 * self.round, 100 * self.round + count))
        elif num_open:
            self._prune(whole=True)
            num_open, count = 0, 1
        else:
            count = self.random.randint(1, 3)
        tokens = tuple(self.random.randrange(VOCAB) for _ in range(count))
        names = tuple(self.ids[parent] if parent >= 0 else ROOT for parent in self.parents[num_open:]) or None
        ids = self.ids[num_open:] or None
        for branch, prompt in enumerate(self.prompts):
            start = len(prompt) + self.length + num_open
            self._ask(branch, Segment(self.seqs[branch], start, tokens, names, "all", ids))
        self.length += 0 if self.parents else count

    def _prune(self, *, whole: bool = False) -> None:
        """Keep a path, and with it some of what hangs below; whole: nothing stays open."""
        keep, rest = [], []
        row = self.random.choice([i for i, parent in enumerate(self.parents) if parent == -1])
        keep.append(row)
        while (below := [i for i, parent in enumerate(self.parents) if parent == row]) and self.random.random() < 0.5:
            row = self.random.choice(below)
            keep.append(row)
        index = {row: -1}
        for i, parent in enumerate(self.parents):
            if not whole and parent in index and i not in keep:
                index[i] = len(rest)
                rest.append(i)
        for seq in self.seqs:
            kept, live = (tuple(self.ids[row] for row in rows) for rows in (keep, rest))
            self.steps.submit(SequenceOp.prune(seq, kept, live))
        self.length += len(keep)
        self.parents = tuple(index[self.parents[i]] for i in rest)
        self.ids = tuple(self.ids[i] for i in rest)

    def _ask(self, branch: int, segment: Segment) -> None:
        place = self.number, branch, self.round

        def answer(result: object) -> None:
            assert isinstance(result, tuple) and not isinstance(result, EngineError), result
            self.scores[place] = result
            self.missing -= 1

        self.missing += 1
        self.steps.submit(ForwardRequest(segment, answer, group=self.group, salt=self.salt))


def scores_of(engine: Engine, count: int, seed: int) -> tuple[Scores, StepExecutor]:
    """Answers begin and go on in an order of the seed's, and end in any."""
    steps, scores, random = StepExecutor(engine, 48), Scores(), Random(seed)
    answers = [Answer(number, steps, scores) for number in range(count)]
    while going := [answer for answer in answers if not answer.ended]:
        ready = [answer for answer in going if not answer.missing]
        if ready and random.random() < 0.6:
            random.choice(ready).advance()
            continue
        scheduled = steps.next()
        if scheduled is None:
            steps.scheduler.tick()
            continue
        for answer, result in steps.run(scheduled):
            answer(result)
        steps.check()
    assert steps.idle and not any(engine.length(seq) for answer in answers for seq in answer.seqs)
    return scores, steps


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("seed", range(2))
def test_answers_in_little_memory_have_the_scores_of_those_with_room(
    subject: str, seed: int, checkpoint: Callable[[str], Path]
) -> None:
    expected, with_room = scores_of(engine_of(subject, None, checkpoint), 9, seed)
    found, short = scores_of(engine_of(subject, CAPACITY, checkpoint), 9, seed)
    assert found.keys() == expected.keys()
    for place, dists in expected.items():
        assert_same(found[place], dists)
    assert short.scheduler.preemptions > 1 and not with_room.scheduler.preemptions
    assert short.rows > with_room.rows, "nothing was computed again"
