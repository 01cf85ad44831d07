"""Parser of what agents want searched: one question or query a line, as soon as its line ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.workflow.agents.reading.items import has_declined, items_of
from paceline.workflow.agents.reading.lines import LineReader
from paceline.workflow.agents.reading.text import folded, is_repetitive, one_line
from paceline.workflow.agents.reading.vocabulary import Vocabulary

MAX_LINE: Final = 1200  # characters: several items may stand on one line


@dataclass(frozen=True, slots=True)
class Queries:
    """What is to be searched for."""

    texts: tuple[str, ...]
    fallback: bool  # the model wrote nothing usable; the texts are those of the agent's fallback, if it has one
    declined: bool  # the model said that nothing is to be searched for
    dropped: int  # items that were not usable: nonsense, too long, or there before


@dataclass(frozen=True, slots=True)
class QueryRules:
    """What an agent's queries must be like, and what stands for them if none is."""

    most: int
    max_chars: int  # of one query
    vocabulary: Vocabulary  # a query has at least one word of it, or is nonsense
    fallback: str = ""  # "": nothing is searched for
    may_decline: bool = True  # that the model wants no search is a decision; otherwise the fallback is taken


class QueryParser:
    """At most `most` distinct queries. What follows the last of them, or a refusal, is not read."""

    def __init__(self, rules: QueryRules) -> None:
        self._rules = rules
        self._lines = LineReader(MAX_LINE)
        self._texts: list[str] = []
        self._seen: set[str] = set()
        self._declined = self._ended = self._fallback = False
        self._dropped = 0

    @property
    def done(self) -> bool:
        return self._ended or self._declined or len(self._texts) >= self._rules.most

    def feed(self, piece: str) -> list[str]:
        return [] if self.done else self._read(self._lines.feed(piece))

    def end(self) -> list[str]:
        if self._ended:
            return []
        found = [] if self.done else self._read(self._lines.end())
        self._ended = True
        if not self._texts and not (self._declined and self._rules.may_decline):
            self._fallback = True
            found = [self._rules.fallback] if self._rules.fallback else []
            self._texts += found
        return found

    def result(self) -> Queries:
        return Queries(tuple(self._texts), self._fallback, self._declined, self._dropped)

    def _read(self, lines: list[str]) -> list[str]:
        found: list[str] = []
        for line in lines:
            if self.done:
                break
            self._declined = has_declined(line)
            for item in [] if self._declined else items_of(line):
                if len(self._texts) < self._rules.most:
                    found += self._accepted(item)
        return found

    def _accepted(self, item: str) -> list[str]:
        text = one_line(item)
        key = folded(text)
        rules = self._rules
        nonsense = not key or len(text) > rules.max_chars or is_repetitive(text) or not rules.vocabulary.touches(text)
        if nonsense or key in self._seen:
            self._dropped += bool(text)
            return []
        self._seen.add(key)
        self._texts.append(text)
        return [text]
