"""What becomes of the agents' texts: sub-questions are looked up, statements take their passages' place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.shortlist import Found
from paceline.workflow.agents.agent import AgentParser
from paceline.workflow.agents.queries import Queries
from paceline.workflow.agents.records import Evidence, Origin, Prompt, SourcePassage
from paceline.workflow.agents.refine import MAX_STATEMENTS, REFINE, RefineInputs, most_statements
from paceline.workflow.agents.rewrite import REWRITE, RewriteInputs
from paceline.workflow.agents.statements import Refined
from paceline.workflow.graph import SubStage


class ReadsLater(Protocol):
    def read_later(self, found: Sequence[Found]) -> None:
        """Passages that the answer is to read."""


class LooksUp(Protocol):
    def look_up(self, question: str) -> list[tuple[SubStage, Work]]:
        """Sub-stages that search for a sub-question."""


class SubQuestions:
    """Looks each sub-question up as soon as it is written. The question itself is looked up in any case."""

    def __init__(self, workflow: LooksUp, question: str) -> None:
        self._workflow = workflow
        self._question = question
        self._inputs = RewriteInputs(question)  # not the conversation: what is written leaves this side
        self._parser: AgentParser[str, Queries] = REWRITE.parser(self._inputs)
        self._found: list[str] = []

    private = False  # the user's own words alone
    is_wanted = True
    share = 1.0

    def messages(self) -> Prompt:
        return REWRITE.messages(self._inputs)

    def restart(self) -> None:
        self._parser = REWRITE.parser(self._inputs)

    def read(self, text: str) -> Outcome:
        return replace(self._look_up(self._parser.feed(text)), finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        last = self._look_up(self._parser.end())
        return last, fault or "; ".join(self._found) or "no sub-question: the question itself is looked up"

    def _look_up(self, questions: Sequence[str]) -> Outcome:
        new = [question for question in questions if question not in (self._question, *self._found)]
        self._found += new
        return Outcome(added=[work for question in new for work in self._workflow.look_up(question)])


class Refining:
    """Statements are read instead of the passages that they cite; without any, the passages are.

    is_wanted: whether any of its passages is read.
    """

    def __init__(self, question: str, heard: Callable[[Sequence[Evidence]], None] = lambda _: None) -> None:
        """heard: called with what was refined, or with the passages where nothing was."""
        self.is_wanted = True
        self._question = question
        self._heard = heard
        self._statements: dict[SourcePassage, list[str]] = {}  # by passage that they cite; empty: they are read whole
        self._found: dict[SourcePassage, Found] = {}
        self._inputs = RefineInputs(question, ())
        self._parser: AgentParser[Evidence, Refined] = REFINE.parser(self._inputs)

    def begin(self, found: Sequence[Found]) -> None:
        """What the text is to read, best first."""
        self._found = {_source(each): each for each in found}
        self._inputs = RefineInputs(self._question, tuple(self._found))
        self._parser = REFINE.parser(self._inputs)

    @property
    def private(self) -> bool:
        return any(found.private for found in self._found.values())

    @property
    def share(self) -> float:
        return most_statements(len(self._found)) / MAX_STATEMENTS

    def has_any(self, passages: Sequence[Found]) -> bool:
        return any(found in passages for found in self._found.values())

    def evidence(self, wanted: Sequence[Found]) -> list[Found]:
        """What is read of its passages, of those that are wanted. Valid when the text has ended."""
        if not self._statements:
            return [found for found in self._found.values() if found in wanted]
        cited = ((self._found[source], texts) for source, texts in self._statements.items())
        return [_refined(found, texts) for found, texts in cited if found in wanted]

    def messages(self) -> Prompt:
        return REFINE.messages(self._inputs)

    def restart(self) -> None:
        self._parser = REFINE.parser(self._inputs)

    def read(self, text: str) -> Outcome:
        self._parser.feed(text)
        return Outcome(finished=self._parser.done)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        self._parser.end()
        refined = self._parser.result()
        cited = self._statements
        failed = refined.fallback or fault is not None
        self._heard([Evidence.of(source) for source in self._found] if failed else refined.evidence)
        for evidence in () if failed else refined.evidence:
            for source in evidence.sources:
                cited.setdefault(source, []).append(evidence.text)
        if not self.is_wanted:
            return Outcome(), fault or "not read: other passages of this search are better"
        told = f"{sum(map(len, cited.values()))} statements of {len(cited)} passages" if cited else "no statement"
        return Outcome(), fault or (told if cited else f"{told}: the passages are read whole")


def _source(found: Found) -> SourcePassage:
    passage = found.passage
    side: Origin = "web" if found.web else found.side
    return SourcePassage(passage.text, side, found.private, passage.title, passage.file_id, passage.url)


def _refined(found: Found, statements: Sequence[str]) -> Found:
    return replace(found, passage=replace(found.passage, text=" ".join(statements)))
