"""What the agents decide that search the web: queries of the plan, and of the second look at what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.runtime.workflows.driver import Outcome, Work
from paceline.workflow.agents.agent import AgentParser
from paceline.workflow.agents.look import LOOK, LookInputs
from paceline.workflow.agents.plan import PLAN, PlanInputs
from paceline.workflow.agents.queries import Queries
from paceline.workflow.agents.reading.text import folded
from paceline.workflow.agents.records import Evidence, Prompt
from paceline.workflow.graph import SubStage, SubStageId

Search = Callable[[str], list[tuple[SubStage, Work]]]  # sub-stages that search the web for a query
MAX_LOOKED_AT = 6  # pieces of evidence: a small model's context has room for these, the question and an answer


class Planning:
    """Searches for each query as soon as it is written. ended: called at the end; sub-stages that are not wanted."""

    def __init__(self, question: str, search: Search, ended: Callable[[], Sequence[SubStageId]]) -> None:
        self._inputs = PlanInputs(question)  # the user's own words: what is written leaves this side
        self._queries = _Queries(PLAN.parser(self._inputs), search, set())
        self._ended = ended

    private = False  # the user's own words alone
    is_wanted = True
    share = 1.0

    def messages(self) -> Prompt:
        return PLAN.messages(self._inputs)

    def restart(self) -> None:
        self._queries.restart(PLAN.parser(self._inputs))

    def read(self, text: str) -> Outcome:
        return self._queries.read(text)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        outcome, told = self._queries.end()
        return replace(outcome, dropped=self._ended()), fault or told

    @property
    def asked(self) -> set[str]:
        """Queries so far, folded."""
        return self._queries.asked


class SecondLook:
    """Reads what came from the web, and searches for what is missing in it. asked: queries of the plan."""

    is_wanted = True
    share = 1.0

    def __init__(self, question: str, search: Search, asked: Callable[[], set[str]]) -> None:
        self._question = question
        self._search = search
        self._asked = asked
        self._evidence: list[Evidence] = []
        self._queries: _Queries | None = None

    def hear(self, evidence: Sequence[Evidence]) -> None:
        """What was refined of a page."""
        self._evidence += evidence

    @property
    def private(self) -> bool:
        return any(each.private for each in self._evidence)

    def messages(self) -> Prompt:
        inputs = LookInputs(self._question, tuple(self._evidence[:MAX_LOOKED_AT]))
        if self._queries is None:
            self._queries = _Queries(LOOK.parser(inputs), self._search, self._asked())
        return LOOK.messages(inputs)

    def restart(self) -> None:
        inputs = LookInputs(self._question, tuple(self._evidence[:MAX_LOOKED_AT]))
        if self._queries is not None:
            self._queries.restart(LOOK.parser(inputs))

    def read(self, text: str) -> Outcome:
        return Outcome(finished=True) if self._queries is None else self._queries.read(text)

    def end(self, fault: str | None) -> tuple[Outcome, str]:
        outcome, told = (Outcome(), "") if self._queries is None else self._queries.end()
        return outcome, fault or told


class _Queries:
    """Searches for what a parser reads, each query once."""

    def __init__(self, parser: AgentParser[str, Queries], search: Search, asked: set[str]) -> None:
        self._parser = parser
        self._search = search
        self._found: list[str] = []
        self.asked = set(asked)

    def read(self, text: str) -> Outcome:
        return replace(self._begin(self._parser.feed(text)), finished=self._parser.done)

    def restart(self, parser: AgentParser[str, Queries]) -> None:
        """The text begins anew; what was searched for is not searched for again."""
        self._parser = parser

    def end(self) -> tuple[Outcome, str]:
        return self._begin(self._parser.end()), "; ".join(self._found) or "nothing to search for"

    def _begin(self, queries: Sequence[str]) -> Outcome:
        new = {folded(query): query for query in queries if folded(query) not in self.asked}
        self.asked |= set(new)
        self._found += new.values()
        return Outcome(added=[work for query in new.values() for work in self._search(query)])
