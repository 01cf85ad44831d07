"""The agent `rewrite`: a question, and the conversation before it, as questions that are searched for apart.

It reads earlier answers, which may quote private documents, so what it writes is for searches of documents alone; the
agents that search the web read the user's own words (`plan`, `look`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.queries import Queries, QueryParser, QueryRules
from paceline.workflow.agents.reading.text import one_line, shortened
from paceline.workflow.agents.reading.vocabulary import Vocabulary
from paceline.workflow.agents.records import Conversation, Prompt

MAX_SUB_QUESTIONS: Final = 4
MAX_SUB_QUESTION: Final = 300  # characters
MAX_QUESTION: Final = 2000  # characters of a question in prompts of agents
MAX_TURN: Final = 300  # characters of an earlier message
MAX_TURNS: Final = 4  # the last ones before the question
_ROLES: Final = {"user": "User", "assistant": "Assistant"}
_INSTRUCTIONS: Final = (
    f"Split the question into 1 to {MAX_SUB_QUESTIONS} short questions that can each be searched for alone, with names "
    "in place of words such as it or they. Write one question a line and nothing else."
)


@dataclass(frozen=True, slots=True)
class RewriteInputs:
    """The question, and the messages before it in order. Other roles than user and assistant are left out."""

    question: str
    conversation: Conversation = ()

    def shortened(self) -> Self | None:
        turns = _turns(self.conversation)
        return replace(self, conversation=turns[1:]) if turns else None


def _turns(conversation: Conversation) -> Conversation:
    """The last messages that are read."""
    turns = [
        message
        for message in conversation
        if message.get("role") in _ROLES and isinstance(text := message.get("content"), str) and text.strip()
    ]
    return turns[-MAX_TURNS:]


def _messages(inputs: RewriteInputs) -> Prompt:
    # A message is one line, so none can pass for another message or for the question.
    before = [
        f"{_ROLES[str(message['role'])]}: {shortened(one_line(str(message['content'])), MAX_TURN)}"
        for message in _turns(inputs.conversation)
    ]
    asked = [f"Question: {shortened(one_line(inputs.question), MAX_QUESTION)}"]
    return [
        {"role": "system", "content": _INSTRUCTIONS},
        {"role": "user", "content": "\n".join([*before, "", *asked] if before else asked)},
    ]


def _parser(inputs: RewriteInputs) -> QueryParser:
    texts = [inputs.question, *(str(message["content"]) for message in _turns(inputs.conversation))]
    rules = QueryRules(
        MAX_SUB_QUESTIONS, MAX_SUB_QUESTION, Vocabulary(texts), fallback=inputs.question, may_decline=False
    )
    return QueryParser(rules)


REWRITE: Final[Agent[RewriteInputs, str, Queries]] = Agent("rewrite", 96, _messages, _parser)
