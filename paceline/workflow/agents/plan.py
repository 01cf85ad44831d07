"""The agent `plan`: what to search the web for. Reads the user's own words alone, so no document is in its queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.queries import Queries, QueryParser, QueryRules
from paceline.workflow.agents.reading.text import one_line, shortened
from paceline.workflow.agents.reading.vocabulary import Vocabulary
from paceline.workflow.agents.records import Prompt
from paceline.workflow.agents.rewrite import MAX_QUESTION

MAX_QUERIES: Final = 3
MAX_QUERY: Final = 200  # characters
_INSTRUCTIONS: Final = (
    f"Which web searches would help to answer the question? Write at most {MAX_QUERIES} short search queries, one a "
    "line and nothing else. Write NONE if no search is needed."
)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """question: of messages of the user alone, never of earlier answers: those may quote private documents."""

    question: str

    def shortened(self) -> Self | None:
        return None


def _messages(inputs: PlanInputs) -> Prompt:
    question = shortened(one_line(inputs.question), MAX_QUESTION)
    return [{"role": "system", "content": _INSTRUCTIONS}, {"role": "user", "content": f"Question: {question}"}]


def _parser(inputs: PlanInputs) -> QueryParser:
    # A user who asked for the web gets a search for the question itself when the model writes nonsense.
    fallback = shortened(one_line(inputs.question), MAX_QUERY)
    return QueryParser(QueryRules(MAX_QUERIES, MAX_QUERY, Vocabulary([inputs.question]), fallback))


PLAN: Final[Agent[PlanInputs, str, Queries]] = Agent("plan", 64, _messages, _parser)
