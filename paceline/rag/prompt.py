"""From a conversation to a query, and from a passage to the prompt of one branch. Pure functions.

Tokenising is the caller's, through `TextModel.document_prompt`; this module knows no engine, no store and no template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from paceline.rag.records import Passage

Messages = Sequence[Mapping[str, object]]
Ids = list[int]

RELEVANCE_TEMPERATURE = 0.8
"""τ_R: a passage's relevance is R = cosine / τ_R, and branches and sides are weighted by exp(R) (specs 1.1).

The same scorer and τ_R on both sides and never normalised per side: a side that found something better must weigh more.
At 0.8, a cosine that is higher by 0.8 counts e times as much. Sharper weights silence the side whose half of a
two-part question is the lesser part of the query's embedding; a side that has nothing relevant is diffuse and does
little harm with a third of the weight. Chosen by measurement, bench/LOG.md.
"""

MAX_QUERY = 1000  # characters; the embedder reads 256 tokens
_SHORT = 4  # words; a question of its own has more
_POINTING = re.compile(
    r"\b(it|its|they|them|their|theirs|he|him|his|she|her|hers|this|that|these|those|there|then|one|ones)\b", re.I
)
_CONTINUING = re.compile(r"\W*(and|or|but|so|also|what about|how about|why|which one)\b", re.I)
_POINTING_WORDS = 10  # a longer question names what it points to


def relevance(passage: Passage, temperature: float = RELEVANCE_TEMPERATURE) -> float:
    """R, the log weight of the passage's branch."""
    return passage.score / temperature


def query_of(messages: Messages) -> str:
    """What to search for: the last user message, after the one before where it does not stand alone.

    A rule, not a model: it reads English, and a message that points back in other words is searched as it is. "" when
    the user has said nothing. Of a long message the beginning and the end are taken: the question is at either.
    """
    said = [
        " ".join(content.split())
        for message in messages
        if message.get("role") == "user" and isinstance(content := message.get("content"), str) and content.strip()
    ]
    if not said:
        return ""
    if len(said) == 1 or not _points_back(said[-1]):
        return _shortened(said[-1], MAX_QUERY)
    last = _shortened(said[-1], MAX_QUERY // 2)
    return f"{_shortened(said[-2], MAX_QUERY - len(last) - 1)} {last}"


def _points_back(text: str) -> bool:
    num_words = len(re.findall(r"\w+", text))
    pointing = _POINTING.search(text) or _CONTINUING.match(text)
    return num_words < _SHORT or (num_words <= _POINTING_WORDS and pointing is not None)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head].rsplit(' ', 1)[0]} {text[-(limit - head - 1) :].split(' ', 1)[-1]}"


def passages_text(passage: Passage) -> str:
    """The document as a model reads it: title line, then the text."""
    return passage.titled.strip()


def prompt_parts(
    messages: Messages,
    passage: Passage,
    document_prompt: Callable[[Messages, str], tuple[Ids, Ids, Ids]],
    *,
    max_document_tokens: int,
) -> tuple[Ids, Ids, Ids] | None:
    """(preamble, document, tail) ids with the document cut, at a word, to at most `max_document_tokens`.

    None when not even its first word fits: the branch must be left out.
    """
    text = passages_text(passage)
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    low, high = 0, len(ends)  # ends[:low] words fit; more than `high` do not
    best: tuple[Ids, Ids, Ids] | None = None
    attempt = high  # first the whole: it mostly fits
    while low < high:
        parts = document_prompt(messages, text[: ends[attempt - 1]])
        if len(parts[1]) <= max_document_tokens:
            best, low = parts, attempt
        else:
            high = attempt - 1
        attempt = (low + high + 1) // 2
    return best
