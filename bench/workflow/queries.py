"""Decisions of agents and lengths of texts, drawn for each question once, the same for all ways.

How many sub-questions and pages there are is assumed; the paper does not say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.workflow.flows import EMBED, FLOWS, SearchStages, WorkflowName, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import Launch, Need, Operation, Outcome, Stage

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


SPLIT: Final = Operation("host", "split")


def _near(search: SearchStages) -> list[Stage]:
    return [] if search.near is None else [search.near]


@dataclass(slots=True)
class QueryScript:
    """A `Script` of the simulation. whole: agents are heard when they have ended, not as they write."""

    query: Query
    stages: WorkflowStages
    documents: Stage  # what searches wait for
    first: list[Stage]  # what is known from the beginning
    whole: bool
    longer: int = 0  # tokens more of the answer
    _heard: dict[Stage, int] = field(default_factory=dict)  # deciding stage -> decisions that were added
    _pages: int = 0

    @staticmethod
    def of(query: Query, workflow: WorkflowName, *, whole: bool, longer: int = 0) -> QueryScript:
        chunks = query.sizes.chunks
        split = Stage("split", SPLIT, chunks, private=True)
        embed = Stage("embed", EMBED, chunks, [Need(split)], request=split.request, private=True)
        stages = WorkflowStages(FLOWS[workflow], query.sizes, split.request)
        first = stages.begin()
        for search in (stages.answer.read,) if stages.searched is None else _near(stages.searched):
            search.needs.append(Need(embed))
        return QueryScript(query, stages, embed, [split, embed, *first], whole, longer)

    def items(self, stage: Stage, first: int, count: int) -> int:
        return max(1, min(count, self._length(stage) - first)) if stage.operation.open_ended else count

    def after(self, stage: Stage, done: int) -> Outcome:
        if not stage.operation.open_ended:
            return Outcome()
        finished = done >= self._length(stage)
        added: list[Stage] = []
        if finished or not self.whole:
            for end in self._decisions(stage)[self._heard.get(stage, 0) :]:
                if done >= end:
                    self._heard[stage] = self._heard.get(stage, 0) + 1
                    added += self._added(stage)
        return Outcome(added=added, finished=finished)

    def jitter(self, launch: Launch) -> float:
        """Factor on a launch's seconds, the same for all ways that make the same launch."""
        jitter = WEB_JITTER if launch.unit.startswith("web") else JITTER
        rng = random.Random(self.query.seed * 1_000_003 + launch.stage.progress.number * 1009 + launch.first)
        return rng.lognormvariate(-0.5 * jitter**2, jitter)

    def _decisions(self, stage: Stage) -> Sequence[int]:
        if self.stages.rewrite is not None and stage is self.stages.rewrite.write:
            return self.query.rewritten
        if self.stages.plan is not None and stage is self.stages.plan.write:
            return self.query.planned
        looks = self.stages.look is not None and stage is self.stages.look.write
        return (WRITTEN,) if looks and self.query.again else ()

    def _added(self, stage: Stage) -> list[Stage]:
        if self.stages.rewrite is not None and stage is self.stages.rewrite.write:
            search = self.stages.search()
            for near in _near(search):
                near.needs.append(Need(self.documents))
            return search.stages
        self._pages += 1
        planned = self.stages.plan is not None and stage is self.stages.plan.write
        return self.stages.page(stage, self.query.page_chunks[self._pages - 1], planned=planned).stages

    def _length(self, stage: Stage) -> int:
        if stage is self.stages.answer.write:
            return self.query.answer + self.longer
        agents = (self.stages.rewrite, self.stages.plan, self.stages.look)
        if any(each is not None and stage is each.write for each in agents):
            return max((*self._decisions(stage), 4))
        return 24 + (self.query.seed * 7 + stage.progress.number * 13) % 17  # of refined passages
