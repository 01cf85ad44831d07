"""The workflow `long`: each passage that may answer a question is read by a job, and so is all that is summarised.

Jobs are items of one stage, which run on the engine's lanes as other texts do. A job's prompt begins with its passage,
as an answer's does, so that rows of it which are known (of an earlier question, or computed ahead) are not computed
again. What a job has written is kept with its passage: a question that is asked again, as after the end of a program
that was killed, goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, zip_longest
from typing import Final, Protocol

from paceline.core.side import Side
from paceline.errors import PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage, Vectors
from paceline.runtime.service import GenerateRequest
from paceline.runtime.workflows.lookup import Found, Lookup, Shortlist, Workflow, within
from paceline.settings_tables import TUNING
from paceline.workflow import jobs
from paceline.workflow.flows import SearchStages
from paceline.workflow.graph import Launch, Outcome, Stage

READ: Final = 8  # passages of the answer, of each side's documents
FILLED: Final = 2  # passages that an answer reads, though no job found an answer in them
TOLD: Final = 8  # times that jobs of a stage tell how far they are
JOB_S: Final = 120.0  # longest time of a job, on a machine whose lanes are all busy


@dataclass(frozen=True, slots=True)
class LongTerms:
    """Of one workflow. points: the model answers with words of a passage, and follows no instructions."""

    passages: int = TUNING.long_passages  # of this side's documents that are read for a question
    fingerprint: str = ""  # of the model that reads
    refusals: tuple[str, ...] = ()  # what it says where a passage holds no answer
    points: bool = False
    titles: tuple[str, ...] = ()  # of documents, for the plan; none where anything of that can leave
    # The answer's request as one for each part of its question; none where it is written in one part.
    parts: Callable[[GenerateRequest], Sequence[GenerateRequest]] = lambda _: ()

    def key(self, owner: str, asked: str, text: str) -> str:
        """A hash of all that a reply depends on."""
        parts = (owner, self.fingerprint, asked, text)
        return hashlib.sha256("\0".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()


class LongWorkflow(Workflow, Protocol):
    terms: LongTerms

    async def reply(self, launch: Launch, asked: str, found: Found, max_tokens: int) -> str:
        """What this side's model writes of a passage, as far as that is not kept. Raises PacelineError."""

    def jobs_again(self, launch: Launch, count: int) -> Stage:
        """A stage of so many more jobs, which the answer waits for."""


@dataclass(slots=True)
class Round:
    """Jobs of one stage. places: of their passages among all."""

    asked: str
    tokens: int  # of a reply, at most
    places: Sequence[int]
    read: Sequence[Found]
    replies: dict[int, str] = field(default_factory=dict)  # by place
    failed: int = 0
    ended: bool = False


class PassageJobs(Lookup):
    """The work of a search's stages whose passages are read by jobs."""

    run: LongWorkflow
    told = "{done} of {whole} passages read{failed}; {held} hold an answer to {question!r}"

    def __init__(self, question: str, run: LongWorkflow, stages: SearchStages, *, share: int = 1) -> None:
        """share: of the passages that a question reads, one in so many is read."""
        super().__init__(question, run, stages)
        self._most = max(1, run.terms.passages // share)
        self._found: list[Found] = []
        self._searches = sum(each is not None for each in (stages.near, stages.far))
        self._replies = jobs.Replies(())
        self.chosen: Sequence[Found] = ()  # that the answer reads, the best first

    def _near(self, vector: Vectors) -> Sequence[Found]:
        return self.run.places.search(self.question, vector, self._most)

    def _searched(self, launch: Launch, found: Sequence[Found], ranked: Shortlist | None) -> Outcome:
        del ranked
        self._found += found
        self._searches -= 1
        self.run.note(launch, f"{len(found)} passages for {self.question!r}")
        if self._searches:
            return Outcome()
        stage = self.stages.jobs
        assert stage is not None, "a flow that reads has jobs"
        if not self._found:
            return Outcome(dropped=[stage])
        self._found.sort(key=lambda each: each.side != self.run.places.side)  # whichever search ended first
        self._begin(stage, self._first())
        return Outcome()

    def _first(self) -> Round:
        """All that is to be read is known."""
        texts = [f"{each.passage.document} {passages_text(each.passage)}" for each in self._found]
        self._replies = jobs.Replies(jobs.bearings(self.question, texts))
        asked = jobs.asked_of_passage(self.question, points=self.run.terms.points)
        return Round(asked, jobs.JOB_TOKENS, range(len(self._found)), self._found)

    def _begin(self, stage: Stage, round_: Round) -> None:
        stage.resize(len(round_.read))
        stage.run = partial(self._work, round_)

    async def _work(self, round_: Round, launch: Launch) -> Outcome:
        for item in range(launch.first, launch.first + launch.count):
            place, found = round_.places[item], round_.read[item]
            try:
                reply = await within(JOB_S, self.run.reply(launch, round_.asked, found, round_.tokens))
            except PacelineError:
                reply, round_.failed = "", round_.failed + 1
            round_.replies[place] = self._counts(reply, found)
            self._tell(round_, launch)
        if round_.ended or len(round_.replies) < len(round_.places):
            return Outcome()
        round_.ended = True
        return await self._after(round_, launch)

    def _counts(self, reply: str, found: Found) -> str:
        """What counts of a reply."""
        if reply.startswith(self.run.terms.refusals):
            return ""
        return jobs.span_of(reply, passages_text(found.passage), self.question)

    def _tell(self, round_: Round, launch: Launch) -> None:
        done, whole = len(round_.replies), len(round_.places)
        if done * TOLD // whole > (done - 1) * TOLD // whole:
            held = sum(map(bool, round_.replies.values()))
            failed = f", {round_.failed} could not be" if round_.failed else ""
            told = self.told.format(done=done, whole=whole, failed=failed, held=held, question=self.question)
            self.run.note(launch, told, failed=done == whole and bool(round_.failed))

    async def _after(self, round_: Round, launch: Launch) -> Outcome:
        """All jobs of a round have ended: those that disagree are read again, with what stands around them."""
        again = self._replies.hear(round_.replies)
        if not again:
            self.chosen = self._choice()
            return Outcome()
        read = [await self._wider(self._found[place]) for place in again]
        return self._more(launch, replace(round_, places=again, read=read, replies={}, failed=0, ended=False))

    def _more(self, launch: Launch, round_: Round) -> Outcome:
        stage = self.run.jobs_again(launch, len(round_.read))
        self._begin(stage, round_)
        return Outcome(added=[stage])

    def _choice(self) -> list[Found]:
        """Passages that hold an answer, else some that are as similar as what other workflows read."""
        order, held = [self._found[place] for place in self._replies.order()], self._replies.found
        similar = [each for each in order[held:] if each.passage.score >= self.run.places.min_score]
        return [*order[:held], *similar[: max(0, FILLED - held)]]

    async def _wider(self, found: Found) -> Found:
        """A passage with as many before and after it as there were rounds."""
        around = await asyncio.to_thread(self.run.places.around, found, self._replies.rounds)
        return joined(around) if around else found


class SummaryJobs(PassageJobs):
    """The same for all that there is: parts that follow each other are summarised, and then their summaries, until
    there are few enough for an answer."""

    told = "{done} of {whole} parts summarised{failed}"

    def _near(self, vector: Vectors) -> Sequence[Found]:
        del vector
        return self.run.places.whole(self.question)

    def _first(self) -> Round:
        return self._level(self._found)

    def _level(self, found: Sequence[Found]) -> Round:
        sizes = [(each.passage.file_id or each.passage.document, len(each.passage.text)) for each in found]
        parts = jobs.parts_of_texts(sizes, self._most)
        self._found = [found[part.start] for part in parts]
        read = [joined(found[part.start : part.stop]) for part in parts]
        return Round(jobs.SUMMARISE, jobs.SUMMARY_TOKENS, range(len(read)), read)

    def _counts(self, reply: str, found: Found) -> str:
        return jobs.summary_of(reply, found.passage.text)

    async def _after(self, round_: Round, launch: Launch) -> Outcome:
        said = [
            replace(found, passage=replace(found.passage, text=round_.replies[place]))
            for place, found in enumerate(self._found)
        ]
        if len(said) > READ:
            level = self._level(said)
            if len(level.read) < len(said):
                return self._more(launch, level)
            ends = [place * len(said) // READ for place in range(READ + 1)]  # one of each document: none is left out
            said = [joined(said[begin:end]) for begin, end in pairwise(ends)]
        self.chosen = said
        return Outcome()


def chosen_of(readings: Sequence[PassageJobs], side: Side) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
    """Passages of this side and of the other one that an answer reads: of each question the best first, each once,
    whichever of them was read first."""
    once: dict[tuple[Side, int, str], Found] = {}
    for rank in zip_longest(*(reading.chosen for reading in readings)):
        for each in filter(None, rank):
            once.setdefault((each.side, each.passage.chunk_id, each.passage.text), each)
    own = [each.passage for each in once.values() if each.side == side]
    others = [each.passage for each in once.values() if each.side != side]
    return tuple(own[:READ]), tuple(others[:READ])


def joined(found: Sequence[Found]) -> Found:
    """Texts that follow each other as one passage, of no store: nothing computed of it is kept with one. Those of
    several documents are named."""
    first, passages = found[0], [each.passage for each in found]
    are_apart = len({each.file_id or each.document for each in passages}) > 1
    text = "\n".join(f"{each.document}: " * are_apart + each.text.strip() for each in passages)
    return replace(first, passage=replace(first.passage, text=text, collection=""))
