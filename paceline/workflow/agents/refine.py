"""The agent `refine`: passages of one search as short statements, each with the passages it comes from.

Where it writes nothing usable, or that nothing helps, the passages themselves are what the answer is written from: a
small model says so too easily for what was found to be thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.fence import WARNING, quoted_passages
from paceline.workflow.agents.reading.text import one_line, shortened
from paceline.workflow.agents.records import Evidence, Prompt, SourcePassage, fewer_passages
from paceline.workflow.agents.rewrite import MAX_QUESTION
from paceline.workflow.agents.statements import Refined, StatementParser

MAX_STATEMENTS: Final = 4
STATEMENTS_EACH: Final = 2  # of a passage, as far as there are few
MAX_PASSAGES: Final = 8  # the first ones are read
MAX_TEXT: Final = 2000  # characters of one
_INSTRUCTIONS: Final = (
    "Write at most {most} short statements from the quotes that help to answer the question, one a line, "
    f"each with the number of its quote at the end, such as [1]. Write NOTHING if no quote helps. {WARNING}"
)


@dataclass(frozen=True, slots=True)
class RefineInputs:
    """passages: the best first."""

    question: str
    passages: tuple[SourcePassage, ...]

    def shortened(self) -> Self | None:
        fewer = fewer_passages(self.passages)
        return None if fewer is None else replace(self, passages=fewer)


def most_statements(passages: int) -> int:
    """Of so many passages: a text of few of them is short."""
    return min(MAX_STATEMENTS, STATEMENTS_EACH * max(1, passages))


def _messages(inputs: RefineInputs) -> Prompt:
    passages = quoted_passages(inputs.passages[:MAX_PASSAGES], MAX_TEXT)
    question = shortened(one_line(inputs.question), MAX_QUESTION)
    return [
        {"role": "system", "content": _INSTRUCTIONS.format(most=most_statements(len(inputs.passages)))},
        {"role": "user", "content": f"{passages}\n\nQuestion: {question}"},
    ]


def _parser(inputs: RefineInputs) -> StatementParser:
    shown = inputs.passages[:MAX_PASSAGES]
    return StatementParser(inputs.question, shown, inputs.passages, most=most_statements(len(shown)))


REFINE: Final[Agent[RefineInputs, Evidence, Refined]] = Agent("refine", 160, _messages, _parser)
