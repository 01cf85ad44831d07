"""Queries from conversations, and passages into prompts of branches.

The caller tokenises, through `TextModel.document_prompt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from paceline.core.attached import taken_apart
from paceline.core.printable import shortened
from paceline.core.words import Words
from paceline.rag.records import Passage
from paceline.settings_tables import TUNING

Messages = Sequence[Mapping[str, object]]  # a conversation: role and content of each message
Ids = list[int]

RELEVANCE_TEMPERATURE = TUNING.relevance_temperature
"""τ_R: a passage's relevance is R = cosine / τ_R, and branches and sides are weighted by exp(R) (DRAGON).

Both sides use the same scorer and τ_R, and relevance is never normalised per side: the side with the better passage
must weigh more. At 0.8, a cosine that is higher by 0.8 weighs e times as much. Sharper weights suppress the side whose
half of a two-part question is the smaller part of the query's embedding; a side without a relevant passage has a
diffuse distribution and does little harm with a third of the weight. Chosen by measurement, bench/LOG.md.
"""

MAX_QUERY = 1000  # characters; the embedder reads 256 tokens
_MIN_STANDALONE_WORDS = 4
_PRONOUN = re.compile(
    r"\b(it|its|they|them|their|theirs|he|him|his|she|her|hers|this|that|these|those|there|then|one|ones)\b", re.I
)
_CONTINUATION = re.compile(r"\W*(and|or|but|so|also|what about|how about|why|which one)\b", re.I)
_MAX_FOLLOW_UP_WORDS = 10  # a longer question names what its pronouns refer to


def relevance(passage: Passage, temperature: float = RELEVANCE_TEMPERATURE) -> float:
    """R, the log weight of a passage's branch."""
    return passage.score / temperature


def query_of(messages: Messages) -> str:
    """The search query: the last user message without the documents in it, preceded by the one before if it depends on
    that.

    A rule for English, not a model: a dependent message without the known pronouns and conjunctions is searched alone.
    "" without user messages. A long message is cut to its beginning and end, where the question usually is.
    """
    user_texts = [
        " ".join(own.split())
        for message in messages
        if message.get("role") == "user"
        and isinstance(content := message.get("content"), str)
        and (own := taken_apart(content)[0])
    ]
    if not user_texts:
        return ""
    if len(user_texts) == 1 or not _is_follow_up(user_texts[-1]):
        return shortened(user_texts[-1], MAX_QUERY)
    last = shortened(user_texts[-1], MAX_QUERY // 2)
    return f"{shortened(user_texts[-2], MAX_QUERY - len(last) - 1)} {last}"


def _is_follow_up(text: str) -> bool:
    """True if a message seems to depend on the one before it."""
    num_words = len(Words(text).words())
    reference = _PRONOUN.search(text) or _CONTINUATION.match(text)
    return num_words < _MIN_STANDALONE_WORDS or (num_words <= _MAX_FOLLOW_UP_WORDS and reference is not None)


PARTED = "\n\n"  # between passages that stand in one context


def passages_text(passage: Passage) -> str:
    """A passage as it stands in prompts: title line, then the text, without blanks around."""
    return passage.titled.strip()


def prompt_parts(
    messages: Messages,
    text: str,
    document_prompt: Callable[[Messages, str], tuple[Ids, Ids, Ids]],
    *,
    max_document_tokens: int,
) -> tuple[Ids, Ids, Ids] | None:
    """Token ids (preamble, document, tail), the document's text truncated at a word to at most `max_document_tokens`.

    None when not even its first word fits: the branch must be omitted.
    """
    word_ends = [match.end() for match in re.finditer(r"\S+", text)]
    low, high = 0, len(word_ends)  # `low` words fit; more than `high` do not
    best: tuple[Ids, Ids, Ids] | None = None
    attempt = high  # the whole text first, since it usually fits
    while low < high:
        parts = document_prompt(messages, text[: word_ends[attempt - 1]])
        if len(parts[1]) <= max_document_tokens:
            best, low = parts, attempt
        else:
            high = attempt - 1
        attempt = (low + high + 1) // 2
    return best
