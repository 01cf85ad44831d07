"""The agent `answer`: the prompt of the final answer, with numbered sources, and the citations of its text.

Sources stand where a document stands in other prompts, first and before the conversation (`Tokenizer.document_prompt`):
models that were trained to read a document there read these, and what was read stays valid while more is found. The
question is the last message, unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.fence import WARNING, numbered_sources, quoted_evidence
from paceline.workflow.agents.reading.citations import CitationScanner, resolved
from paceline.workflow.agents.records import Conversation, Evidence, Prompt, SourcePassage, less_evidence

MAX_EVIDENCE: Final = 24  # the first ones are read
MAX_TEXT: Final = 2000  # characters of one
MAX_CITATIONS: Final = 256  # of one answer
PREAMBLE: Final = "Answer from this document.\n"  # what `Tokenizer.document_prompt` begins with
_INSTRUCTIONS: Final = f"After each claim, write the number of its source, such as [1]. {WARNING}"


@dataclass(frozen=True, slots=True)
class AnswerInputs:
    """evidence: in the order in which it was refined. conversation: the messages before the question, as they are."""

    question: str
    evidence: tuple[Evidence, ...] = ()
    conversation: Conversation = ()

    def shortened(self) -> Self | None:
        less = less_evidence(self.evidence)
        return None if less is None else replace(self, evidence=less)


@dataclass(frozen=True, slots=True)
class SourceCitation:
    """A place in the answer that names a source."""

    number: int  # as in the text
    start: int  # characters of the answer, brackets included
    end: int
    source: SourcePassage


@dataclass(frozen=True, slots=True)
class CitedAnswer:
    citations: tuple[SourceCitation, ...]
    sources: tuple[SourcePassage, ...]  # cited at least once; without any citation: all that were read
    fallback: bool  # there were sources, and the answer cites none


def answer_document(inputs: AnswerInputs) -> str:
    """The evidence as the document of `Tokenizer.document_prompt`; "" where there is none. More evidence only adds to
    its end."""
    found = quoted_evidence(inputs.evidence[:MAX_EVIDENCE], MAX_TEXT)
    return f"{_INSTRUCTIONS}\n{found}" if found else ""


def _messages(inputs: AnswerInputs) -> Prompt:
    """The same as messages. Without evidence, they are the conversation and the question alone."""
    asked: Prompt = [*inputs.conversation, {"role": "user", "content": inputs.question}]
    document = answer_document(inputs)
    if not document:
        return asked
    content = f"{PREAMBLE}{document}"
    if asked[0].get("role") == "system":  # many templates accept one such message only
        content += f"\n\n{asked.pop(0).get('content') or ''}"
    return [{"role": "system", "content": content}, *asked]


class AnswerParser:
    """Citations of an answer, as soon as their brackets close. Numbers that no source has are dropped."""

    def __init__(self, inputs: AnswerInputs) -> None:
        self._sources = numbered_sources(inputs.evidence[:MAX_EVIDENCE])
        self._scanner = CitationScanner()
        self._citations: list[SourceCitation] = []
        self._ended = False

    @property
    def done(self) -> bool:
        """Only after `end`: all of an answer is for the user."""
        return self._ended

    def feed(self, piece: str) -> list[SourceCitation]:
        if self._ended:
            return []
        found = [
            SourceCitation(number, each.start, each.end, self._sources[number - 1])
            for each in self._scanner.feed(piece)
            for number in resolved(each.ranges, len(self._sources))
        ][: MAX_CITATIONS - len(self._citations)]
        self._citations += found
        return found

    def end(self) -> list[SourceCitation]:
        self._ended = True
        return []

    def result(self) -> CitedAnswer:
        cited = dict.fromkeys(each.source for each in self._citations)
        return CitedAnswer(tuple(self._citations), tuple(cited or self._sources), bool(self._sources) and not cited)


ANSWER: Final[Agent[AnswerInputs, SourceCitation, CitedAnswer]] = Agent("answer", None, _messages, AnswerParser)
