"""Jobs of the workflow `long`: what each is asked about one passage, how its reply is checked, and what all come to.

Of a reply counts what stands in the passage: a small model invents, but it cannot have invented a passage. Where the
replies to one question disagree, those passages are read again with more of what stands around them. What jobs have
said is never text of an answer: it chooses the passages that the answer reads. Summaries are texts of their own, of
which each sentence is kept that has its words, and every figure, from what was read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.printable import shortened
from paceline.workflow import reading

JOB_TOKENS: Final = 32  # of a reply: a few words
SUMMARY_TOKENS: Final = 96
MAX_REPLY: Final = 60  # words of it that are compared with the passage
MAX_ASKED: Final = 1000  # characters of a question
ROUNDS: Final = 2  # in which passages are read again, at most
AGAIN: Final = 8  # passages of a round
BEARING: Final = 0.5  # of the best passage's that holds an answer: replies of passages with less count for nothing
SUMMARISED: Final = 6000  # characters that one text summarises, at most
LEAST_SUMMARISED: Final = 2400  # as long as there are few enough such parts
_ASK: Final = (
    "{question}\nReply with the few words of the text that answer this, exactly as they stand there. Reply NONE if the "
    "text does not answer it."
)
SUMMARISE: Final = "What does the text say? Name its facts in at most three short sentences, and nothing else."
_SUMMARY: Final = re.compile(
    r"\b(?:summar\w+|sum\s+up|overview|synopsis|zusammenfass\w*|fass\w*\s.*\bzusammen|résum\w+)", re.I
)
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")


def asks_summary(question: str) -> bool:
    """Whether all that there is to be read is to be summarised, rather than something found in it."""
    return _SUMMARY.search(question) is not None


def named_in(question: str, names: Collection[str]) -> set[str]:
    """Names of files that a question has word for word; the ending may be left out of names of several words."""
    asked = _spaced(reading.words_apart(question))
    found = set()
    for name in names:
        whole, stem = reading.words_apart(name), reading.words_apart(name.rpartition(".")[0])
        if (whole and _spaced(whole) in asked) or (len(stem) > 1 and _spaced(stem) in asked):
            found.add(name)
    return found


def asked_of_passage(question: str, *, points: bool) -> str:
    """The message of a job. points: to a model that answers with words of the passage anyway, and follows nothing."""
    text = shortened(reading.one_line(question), MAX_ASKED)
    return text if points else _ASK.format(question=text)


# ---- what counts of a reply ------------------------------------------------------------------------------------------


def span_of(reply: str, passage: str, question: str) -> str:
    """The run of a reply's words that stands in the passage and adds most to the question, folded; of equal ones the
    longest, then the first. "" where the reply declines, adds nothing, or adds more than stands there: a figure, or
    half of its words."""
    line = reading.one_line(reply)
    if reading.has_declined(line):
        return ""
    said = reading.words_apart(line)[:MAX_REPLY]
    whole, asked = " ".join(said), " ".join(reading.words_apart(question))
    standing = _spaced(reading.words_apart(passage))
    runs, end = [""], 0
    for start in range(len(said)):
        end = max(end, start)
        while end < len(said) and _spaced(said[start : end + 1]) in standing:
            end += 1
        runs.append(" ".join(said[start:end]))
    known = reading.terms(asked)
    found = max(runs, key=lambda run: (len(reading.terms(run) - known), len(run)))
    kept, added = reading.terms(found) - known, reading.terms(whole) - known
    if not kept or 2 * len(kept) < len(added):
        return ""
    return found if reading.figures(whole) - reading.figures(asked) <= reading.figures(found) else ""


def agree(one: str, other: str) -> bool:
    """Whether two spans say the same: the words of one are a run of the other's."""
    one, other = _spaced(one.split()), _spaced(other.split())
    return one in other or other in one


def _spaced(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


def bearings(question: str, passages: Sequence[str]) -> list[float]:
    """How much of the question each passage holds, 0 to 1: of its words that some passages hold and others do not,
    the rarer ones weighing more. A name is what tells the passage that answers from those that could answer another
    question of the kind, which a small model answers as well."""
    held = [set(reading.words_apart(passage)) for passage in passages]
    counts = {word: sum(word in words for words in held) for word in reading.words_apart(question)}
    weights = {word: math.log(len(held) / count) for word, count in counts.items() if count}
    whole = sum(weights.values())
    # In the question's order: that of a set differs from process to process, and with it the last bit of a sum.
    sums = (sum(weight for word, weight in weights.items() if word in words) for words in held)
    return [each / whole if whole else 1.0 for each in sums]


def summary_of(reply: str, text: str) -> str:
    """The sentences of a reply that the text supports, each once; where there is none, the beginning of the text."""
    vocabulary, kept = reading.Vocabulary([text]), dict[str, str]()
    for sentence in map(reading.cleaned, map(reading.one_line, _SENTENCE.split(reply))):
        if vocabulary.supports(sentence) and not reading.is_repetitive(sentence) and not reading.has_declined(sentence):
            kept.setdefault(reading.folded(sentence), sentence)
    return " ".join(kept.values()) or reading.beginning(reading.one_line(text), LEAST_SUMMARISED // 8)


def parts_of_texts(sizes: Sequence[tuple[str, int]], most: int) -> list[range]:
    """Texts that follow each other and are summarised together, at most so many times. sizes: the document of each
    text, and its characters: no part is of two documents. Where even the longest parts are too many, some are left out,
    evenly."""
    total = sum(size for _, size in sizes)
    limit = min(max(LEAST_SUMMARISED, 2 * total // max(1, most)), SUMMARISED)
    parts: list[range] = []
    held = 0
    for place, (document, size) in enumerate(sizes):
        if parts and sizes[place - 1][0] == document and held + size <= limit:
            parts[-1] = range(parts[-1].start, place + 1)
            held += size
        else:
            parts.append(range(place, place + 1))
            held = size
    return [parts[place * len(parts) // most] for place in range(most)] if len(parts) > most else parts


# ---- what all replies come to ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Replies:
    """Replies to one question, by the places of their passages, which stand best first."""

    bearings: Sequence[float]  # of the passages
    rounds: int = 0  # in which passages were read again
    _spans: dict[int, str] = field(default_factory=dict)  # that stand in their passages
    _sure: set[int] = field(default_factory=set)  # read again, and the same said

    @property
    def found(self) -> int:
        """Passages that hold an answer, as far as is known."""
        return len(self._spans)

    def hear(self, spans: Mapping[int, str]) -> list[int]:
        """A round has ended. spans: what counts of each reply; "": nothing. Returns the places that are to be read
        again, with so much more around them as there were rounds; none: it is over."""
        if not self.rounds:
            said = {place: span for place, span in sorted(spans.items()) if span}
            least = BEARING * max((self.bearings[place] for place in said), default=0.0)
            self._spans = {place: span for place, span in said.items() if self.bearings[place] >= least}
        else:
            same = {place for place, span in spans.items() if span and agree(span, self._spans[place])}
            for place in spans.keys() - same if same else ():  # where all have changed, nobody is right
                del self._spans[place]
            self._sure |= same
        again = self._surest_first()[:AGAIN]
        if self.rounds >= ROUNDS or len(self._answers(again)) < 2:
            return []
        self.rounds += 1
        return again

    def order(self) -> list[int]:
        """Places of all passages, in the order in which an answer should read them: first the best one of each answer,
        those first that were said again, then further ones that say the same, then what no job found an answer in."""
        answers = self._answers(self._surest_first())
        firsts = [places[0] for places in answers]
        rest = [place for places in answers for place in places[1:]]
        return [*firsts, *rest, *(place for place in range(len(self.bearings)) if place not in self._spans)]

    def _surest_first(self) -> list[int]:
        return sorted(self._spans, key=lambda place: (place not in self._sure, place))

    def _answers(self, places: Sequence[int]) -> list[list[int]]:
        """Places whose spans agree with the first of them."""
        groups: list[list[int]] = []
        for place in places:
            same = next((group for group in groups if agree(self._spans[group[0]], self._spans[place])), None)
            if same is None:
                groups.append([place])
            else:
                same.append(place)
        return groups
