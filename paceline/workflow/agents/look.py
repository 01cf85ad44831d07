"""The agent `look`, the second look: what else to search the web for, given what was found there.

Its queries leave for the web, so it reads nothing else than what came from the web: other evidence raises ValueError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.fence import WARNING, quoted_evidence
from paceline.workflow.agents.plan import MAX_QUERY
from paceline.workflow.agents.queries import Queries, QueryParser, QueryRules
from paceline.workflow.agents.reading.text import one_line, shortened
from paceline.workflow.agents.reading.vocabulary import Vocabulary
from paceline.workflow.agents.records import Evidence, Prompt, less_evidence
from paceline.workflow.agents.rewrite import MAX_QUESTION

MAX_QUERIES: Final = 2
MAX_EVIDENCE: Final = 12
MAX_TEXT: Final = 400  # characters of one
_INSTRUCTIONS: Final = (
    f"Is anything missing in the quotes to answer the question? Write at most {MAX_QUERIES} short web search queries "
    f"for what is missing, one a line and nothing else. Write NONE if nothing is missing. {WARNING}"
)


@dataclass(frozen=True, slots=True)
class LookInputs:
    """question: as of `PlanInputs`. evidence: all that its writers read is of the web, or ValueError is raised."""

    question: str
    evidence: tuple[Evidence, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", tuple(self.evidence))  # so that nothing is added after the check
        for each in self.evidence:
            read = {*each.origins, *(source.side for source in each.sources)}
            if each.private or any(source.private for source in each.sources):
                raise ValueError("The second look searches the web: it must not read private evidence.")
            if read != {"web"}:
                raise ValueError("The second look reads what came from the web only.")

    def shortened(self) -> Self | None:
        less = less_evidence(self.evidence)
        return None if less is None else replace(self, evidence=less)


def _messages(inputs: LookInputs) -> Prompt:
    found = quoted_evidence(inputs.evidence[:MAX_EVIDENCE], MAX_TEXT) or "Nothing was found."
    question = shortened(one_line(inputs.question), MAX_QUESTION)
    return [
        {"role": "system", "content": _INSTRUCTIONS},
        {"role": "user", "content": f"{found}\n\nQuestion: {question}"},
    ]


def _parser(inputs: LookInputs) -> QueryParser:
    # What it asks for may be known from the pages alone. Nonsense asks for nothing: there has been a search already.
    read = [each.text for each in inputs.evidence[:MAX_EVIDENCE]]
    return QueryParser(QueryRules(MAX_QUERIES, MAX_QUERY, Vocabulary([inputs.question, *read])))


LOOK: Final[Agent[LookInputs, str, Queries]] = Agent("look", 48, _messages, _parser)
