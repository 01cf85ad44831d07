"""Parser of refined statements: one a line, or several, each followed by the numbers of its passages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.workflow.agents.reading.citations import find_citations, resolved, without_citations
from paceline.workflow.agents.reading.items import has_declined, items_of
from paceline.workflow.agents.reading.lines import LineReader
from paceline.workflow.agents.reading.text import folded, is_repetitive, one_line
from paceline.workflow.agents.reading.vocabulary import Vocabulary
from paceline.workflow.agents.records import Evidence, SourcePassage

MAX_LINE: Final = 1600  # characters
MAX_STATEMENT: Final = 400  # characters
_GROUP: Final = r"[\[【][^\[\]【】\n]{1,40}[\]】]"
_SENTENCE: Final = re.compile(rf"(?:[.!?]\s?(?:{_GROUP}\s?)++|{_GROUP}\s?[.!?])(?=\s*\S)")  # its end, with citations


@dataclass(frozen=True, slots=True)
class Refined:
    """What the answer is written from, in place of the passages that were found."""

    evidence: tuple[Evidence, ...]
    fallback: bool  # no statement was usable; the evidence is the original passages
    declined: bool  # the model said that no passage helps
    dropped: int  # statements that were not usable: not from the passages, too long, or there before


class StatementParser:
    """At most `most` distinct statements that are supported by the words of what was read.

    shown: the passages by number, from 1. read: all that the agent was given, for the fallback and for privacy.
    """

    def __init__(
        self, question: str, shown: Sequence[SourcePassage], read: Sequence[SourcePassage], *, most: int
    ) -> None:
        self._shown, self._passages, self._most = shown, read, most
        self._vocabulary = Vocabulary([question, *(f"{each.title}\n{each.text}" for each in shown)])
        self._lines = LineReader(MAX_LINE)
        self._evidence: list[Evidence] = []
        self._seen: set[str] = set()
        self._declined = self._ended = self._fallback = False
        self._dropped = 0

    @property
    def done(self) -> bool:
        return self._ended or self._declined or len(self._evidence) >= self._most

    def feed(self, piece: str) -> list[Evidence]:
        return [] if self.done else self._read(self._lines.feed(piece))

    def end(self) -> list[Evidence]:
        if self._ended:
            return []
        found = [] if self.done else self._read(self._lines.end())
        self._ended = True
        if not self._evidence:
            self._fallback = True
            found = [Evidence.of(passage) for passage in self._passages]
            self._evidence += found
        return found

    def result(self) -> Refined:
        return Refined(tuple(self._evidence), self._fallback, self._declined, self._dropped)

    def _read(self, lines: list[str]) -> list[Evidence]:
        found: list[Evidence] = []
        for line in lines:
            for sentence in _sentences(line):
                if self.done:
                    return found
                self._declined = has_declined(without_citations(sentence))
                if not self._declined:
                    found += self._accepted(sentence)
        return found

    def _accepted(self, sentence: str) -> list[Evidence]:
        items = items_of(without_citations(sentence))
        text = one_line(" ".join(items))
        key = folded(text)
        nonsense = not key or len(text) > MAX_STATEMENT or is_repetitive(text) or not self._vocabulary.supports(text)
        if nonsense or key in self._seen:
            self._dropped += bool(text)
            return []
        self._seen.add(key)
        ranges = [each for citation in find_citations(sentence) for each in citation.ranges]
        cited = (self._shown[number - 1] for number in resolved(ranges, len(self._shown)))
        evidence = Evidence.from_reading(text, cited, self._passages)
        self._evidence.append(evidence)
        return [evidence]


def _sentences(line: str) -> list[str]:
    """The line cut after sentences whose citations follow them."""
    found, start = [], 0
    for match in _SENTENCE.finditer(line):
        found.append(line[start : match.end()])
        start = match.end()
    return [*found, line[start:]]
