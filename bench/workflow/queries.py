"""Decisions of agents and lengths of texts, drawn for each question once, the same for all ways.

How many sub-questions and pages there are is assumed; the paper does not say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.simulation.workflows import Outcome
from paceline.workflow.builder import WorkflowBuilder, WorkflowName, WorkflowSizes
from paceline.workflow.graph import Launch, SubStage

from .lengths import Lengths

CHUNK: Final = 128
OVERLAP: Final = 10
SUB_QUESTIONS: Final = {False: (0.3, 0.5, 0.2), True: (0.1, 0.5, 0.4)}  # several hops -> probabilities of 1, 2, 3
PAGES: Final = (0.2, 0.4, 0.3, 0.1)  # probabilities of 0, 1, 2, 3 that the plan asks for
LOOKS_AGAIN: Final = 0.3  # that the second look asks for one more
WRITTEN: Final = 14  # tokens of a sub-question or a request to the web
JITTER: Final = 0.05  # of a launch's seconds
WEB_JITTER: Final = 0.3


@dataclass(frozen=True, slots=True)
class Query:
    """The truth about one question."""

    seed: int
    sizes: WorkflowSizes
    answer: int  # tokens
    rewritten: tuple[int, ...]  # tokens after which each sub-question is complete
    planned: tuple[int, ...]  # likewise, each request to the web
    page_chunks: tuple[int, ...]
    again: bool

    @staticmethod
    def draw(seed: int, lengths: Lengths, *, several_hops: bool) -> Query:
        rng = random.Random(seed)
        chunks = max(1, -(-(lengths.context - OVERLAP) // (CHUNK - OVERLAP)))
        count = rng.choices((1, 2, 3), SUB_QUESTIONS[several_hops])[0]
        pages = rng.choices((0, 1, 2, 3), PAGES)[0]
        return Query(
            seed,
            WorkflowSizes(lengths.question, chunks, CHUNK),
            lengths.answer,
            _ends(rng, count),
            _ends(rng, pages),
            tuple(rng.randint(3, 9) for _ in range(pages + 1)),
            rng.random() < LOOKS_AGAIN,
        )


def _ends(rng: random.Random, count: int) -> tuple[int, ...]:
    at, found = 0, []
    for _ in range(count):
        at += max(6, round(rng.gauss(WRITTEN, 3)))
        found.append(at)
    return tuple(found)


@dataclass(slots=True)
class QueryScript:
    """A `Script` of the simulation. whole: agents are heard when they have ended, not as they write."""

    query: Query
    builder: WorkflowBuilder
    whole: bool
    longer: int = 0  # tokens more of the answer
    _heard: dict[int, int] = field(default_factory=dict)  # deciding sub-stage -> decisions that were added
    _pages: int = 0

    @staticmethod
    def of(query: Query, workflow: WorkflowName, *, whole: bool, longer: int = 0) -> QueryScript:
        return QueryScript(query, WorkflowBuilder(workflow, query.sizes), whole, longer)

    def items(self, node: SubStage, first: int, count: int) -> int:
        return max(1, min(count, self._length(node) - first)) if node.open_ended else count

    def after(self, node: SubStage, done: int) -> Outcome:
        if not node.open_ended:
            return Outcome()
        finished = done >= self._length(node)
        added: list[SubStage] = []
        if node.decides and (finished or not self.whole):
            ends = self._decisions(node)
            for end in ends[self._heard.get(node.id, 0) :]:
                if done >= end:
                    self._heard[node.id] = self._heard.get(node.id, 0) + 1
                    added += self._added(node)
        return Outcome(added, finished=finished)

    def jitter(self, launch: Launch) -> float:
        """Factor on a launch's seconds, the same for all ways that make the same launch."""
        node_jitter = WEB_JITTER if launch.unit.startswith("web") else JITTER
        rng = random.Random(self.query.seed * 1_000_003 + int(launch.sub_stage) * 1009 + launch.first)
        return rng.lognormvariate(-0.5 * node_jitter**2, node_jitter)

    def _decisions(self, node: SubStage) -> Sequence[int]:
        if node.id == self.builder.rewrite:
            return self.query.rewritten
        if node.id == self.builder.plan:
            return self.query.planned
        return (WRITTEN,) if self.query.again else ()

    def _added(self, node: SubStage) -> list[SubStage]:
        if node.id == self.builder.rewrite:
            return self.builder.sub_question()
        self._pages += 1
        return self.builder.web_request(node.id, self.query.page_chunks[self._pages - 1])

    def _length(self, node: SubStage) -> int:
        if node.id == self.builder.answer:
            return self.query.answer + self.longer
        if node.decides:
            return max((*self._decisions(node), 4))
        return 24 + (self.query.seed * 7 + int(node.id) * 13) % 17  # of refined passages
