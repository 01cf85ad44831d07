"""From a conversation and a document store to the prompts of a machine's branches."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final

from paceline.core.aggregation.weights import log_weight
from paceline.core.policy import Privacy
from paceline.core.side import WayOfReading
from paceline.core.words import Words
from paceline.engine.base import NO_FIELDS, TextModel
from paceline.errors import RequestError
from paceline.rag.prompt import (
    PARTED,
    RELEVANCE_TEMPERATURE,
    Ids,
    Messages,
    passages_text,
    prompt_parts,
    query_of,
    relevance,
)
from paceline.rag.records import MANAGED, MIN_SCORE, Passage, Selection
from paceline.rag.store.readable import Readable
from paceline.runtime.engine_loop.document_prefill import DocumentPrefiller, Pieces
from paceline.runtime.engine_loop.requests import StoredPrefix
from paceline.runtime.questions import Judge
from paceline.runtime.service import Citation
from paceline.strategies.base import Branch, Side, other
from paceline.wire.messages import RelevanceScale, RetrievedPassage

log = logging.getLogger("paceline.node")

SEARCHED_CHARACTERS = 600  # of an answer: with a question, about what MiniLM embeds, which reads the first 256 tokens


def device_log_weight(temperature: float = RELEVANCE_TEMPERATURE) -> float:
    """log h of a device's documents in a joint answer: between one and two passages of the median cosine of right ones,
    see `MIN_SCORE`. temperature: of relevance.

    A constant, since a weight that follows the cosine tells a cloud which sentences stand in the documents, and hardly
    less in two bins than exactly: bench/LOG.md has the figures, and those of answers with this and other constants.
    """
    return 0.56 / temperature + math.log(2) / 2


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one side: a branch per passage, or one with all of them (`together`), or the conversation alone."""

    branches: tuple[Branch, ...]
    passages: tuple[Passage, ...]  # in the order in which they are read; empty if none was found
    plain_tokens: int  # prompt tokens of the conversation without a document
    prefixes: tuple[StoredPrefix, ...] = ()  # prefixes of the prompts that are stored or to be stored
    peer_passages: tuple[Passage, ...] = ()  # of the other side's documents, read after `passages`
    together: bool = False
    unanswered: bool = False  # passages were found, and none answers
    pieces: Pieces | None = None  # of the passages of one context, whose KV may be reused where they stand
    reuses: bool = False  # it is, so that the answer is approximate

    def citations(self, side: Side) -> tuple[Citation, ...]:
        """Citations of the branches with a document. side: this side."""
        sources = (
            *((side, passage, passage.chunk_id) for passage in self.passages),
            *((other(side), passage, None) for passage in self.peer_passages),
        )
        return tuple(
            Citation(
                source,
                passage.document,
                passages_text(passage),
                passage.score,
                passage.file_id,
                passage.collection,
                chunk_id,
                passage.url,
                passage.place,
                passage.chunk_id if chunk_id is None and passage.chunk_id > 0 and not passage.url else None,
            )
            for source, passage, chunk_id in sources
        )

    @property
    def num_passages(self) -> int:
        return len(self.passages) + len(self.peer_passages)

    @property
    def longest(self) -> int:
        return max(len(branch.prompt) for branch in self.branches)

    def with_equal_sides(self) -> PromptSet:
        """The same prompts. The documents of each side together have the weight 1, and among themselves weigh as
        before."""
        own = len(self.branches) - (0 if self.together else len(self.peer_passages))
        return replace(self, branches=(*_as_one(self.branches[:own]), *_as_one(self.branches[own:])))

    def without_relevance(self, temperature: float = RELEVANCE_TEMPERATURE) -> PromptSet:
        """The same prompts, whose documents together weigh what any device's documents weigh, each the same.

        So nothing that a cloud can measure of an answer, its text included, depends on how similar to a question the
        private documents are, or on how many of them are similar.
        """
        number = sum(branch.score is not None for branch in self.branches)
        if not number:
            return self
        score = device_log_weight(temperature) - math.log(number)
        return replace(self, branches=tuple(Branch(branch.prompt, score) for branch in self.branches))


def peer_citations(side: Side, passages: Sequence[RetrievedPassage]) -> tuple[Citation, ...]:
    return tuple(
        Citation(
            side,
            passage.document or "a private document",
            passage.text,
            passage.score,
            place=passage.place,
            peer_chunk=passage.chunk or None,
        )
        for passage in passages
    )


SHORT: Final = 3  # letters of a word that any passage may have


def sharing_words(citations: Sequence[Citation], said: str, question: str) -> tuple[Citation, ...]:
    """Those of passages of one context that hold a word of the answer which the question does not, and which some of
    the passages do not hold either. All, where none does."""
    held = [set(Words(citation.passage).words()) for citation in citations]
    words_said = Words(said)
    told = {word for word in words_said.words() if len(word) > SHORT or not word.isalpha()}
    told.update(words_said.pairs())  # of scripts without blanks, however short
    told.difference_update(Words(question).words(), held[0].intersection(*held[1:]) if held else ())
    found = tuple(citation for citation, words in zip(citations, held, strict=True) if told & words)
    return found or tuple(citations)


def _as_one(branches: Sequence[Branch]) -> Sequence[Branch]:
    """Scores whose log h is 0. A branch without a document stays as it is."""
    scores = [branch.score for branch in branches if branch.score is not None]
    if not scores:
        return branches
    log_h = log_weight(scores)
    return [Branch(each.prompt, None if each.score is None else each.score - log_h) for each in branches]


def query_with_text(messages: Messages, tokens: Sequence[int], tokenizer: TextModel) -> str:
    """The query of both sides in the middle of an answer: the question, and the end of the text so far. tokens: of that
    text."""
    tail = tokens[-4 * SEARCHED_CHARACTERS :]  # a character has four bytes at most, and a token may be one of them
    text = b"".join(map(tokenizer.token_bytes, tail)).decode(errors="ignore")
    return f"{query_of(messages)}\n{text[-SEARCHED_CHARACTERS:]}".strip()


def raw_prompt(prompt: Sequence[int], positions: int, vocab_size: int, *, room: int = 1) -> PromptSet:
    """Prompt of given token ids. Raises RequestError (400) for an empty one, for unknown ids, and where fewer than
    `room` positions are left."""
    unknown = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if not prompt or unknown is not None:
        fault = "is empty" if unknown is None else f"holds {unknown}; token ids are from 0 to {vocab_size - 1}"
        raise RequestError(f"The prompt {fault}.", param="prompt")
    if len(prompt) + room > positions:
        raise too_long(positions, len(prompt), "prompt")
    return PromptSet((Branch(tuple(prompt), None),), (), len(prompt))


def too_long(positions: int, tokens: int, param: str) -> RequestError:
    """The context-length error in OpenAI's words, which agents recognise."""
    return RequestError(
        f"This model's maximum context length is {positions} tokens. However, your {param} resulted in {tokens} "
        f"tokens. Please reduce the length of the {param}.",
        code="context_length_exceeded",
        param=param,
    )


def prompts_of(
    messages: Messages,
    store: Readable | None,
    tokenizer: TextModel,
    *,
    k: int,
    max_prompt: int,
    query: str | None = None,
    kv: DocumentPrefiller | None = None,
    selection: Selection = MANAGED,
    min_score: float = MIN_SCORE,
    found: Sequence[Passage] | None = None,
    others: Sequence[Passage] = (),
    temperature: float = RELEVANCE_TEMPERATURE,
    template: Mapping[str, object] = NO_FIELDS,
    reading: WayOfReading = "apart",
    judge: Judge | None = None,
) -> PromptSet:
    """Search and tokenize. A passage that does not fit within `max_prompt` tokens is left out.

    query: for the search; by default derived from the conversation. selection: the documents to search. found: passages
    to be read instead of what a search finds. others: passages of the other side, to be read as well. The
    conversation itself is never truncated; the caller must refuse it when `plain_tokens` is too large. temperature: of
    relevance. template: further variables of the chat template. reading: as in `wire.messages.Options`.
    judge: of the passages of both sides, where the conversation is a question.
    """
    together = reading != "apart"
    reuses = reading == "reused" and kv is not None and kv.can_join
    separator = tuple(tokenizer.encode(PARTED)) if reuses else ()
    plain = tokenizer.chat(messages, template_kwargs=template)
    document_prompt = partial(tokenizer.document_prompt, template_kwargs=template)
    room = max_prompt - len(plain)
    if found is None:
        found = ()
        if store is not None and k > 0 and room > 0 and (asked := query_of(messages) if query is None else query):
            found = store.search(asked, k, selection, min_score=min_score)
    unanswered = False
    if judge is not None and (found or others) and (asked := judge.question(messages)):
        found, others = (each if judge.finds(asked, each) else () for each in (found, others))
        unanswered = not (found or others)
    read: list[tuple[Passage, tuple[Ids, Ids, Ids]]] = []  # with the tokens before it, its own, and those after it
    own = 0  # of them
    for place, passage in enumerate((*found, *others)):
        text, left = passages_text(passage), room
        if together and read:
            (preamble, _, tail) = read[0][1]
            text = text if reuses else PARTED + text
            left = max_prompt - sum(len(ids) for ids in (preamble, tail, *(document for _, (_, document, _) in read)))
            left -= len(separator) * len(read)
        parts = prompt_parts(messages, text, document_prompt, max_document_tokens=left) if left > 0 else None
        if parts is not None and ((together and read) or sum(map(len, parts)) <= max_prompt):
            read.append((passage, parts))
            own += place < len(found)
    prefixes = []
    for place, (passage, (preamble, document, _)) in enumerate(read):
        ids = (*preamble, *document)
        is_kept = place < own and not passage.url  # a page is not stored, nor is its KV
        if kv is not None and is_kept and (reuses or not together or not place):
            prefixes.append(kv.prefix(passage, ids))
        elif reuses:
            prefixes.append(StoredPrefix(ids))
    branches = [
        Branch((*preamble, *document, *tail), relevance(passage, temperature))
        for passage, (preamble, document, tail) in read
    ]
    if together and read:
        preamble, _, tail = read[0][1]
        documents = [*read[0][1][1], *chain.from_iterable((*separator, *ids) for _, (_, ids, _) in read[1:])]
        score = log_weight([branch.score for branch in branches if branch.score is not None])
        branches = [Branch((*preamble, *documents, *tail), score)]
    passages = tuple(passage for passage, _ in read)
    return PromptSet(
        tuple(branches) or (Branch(tuple(plain), None),),
        passages[:own],
        len(plain),
        tuple(prefixes),
        passages[own:],
        together and bool(read),
        unanswered,
        Pieces(tuple(prefixes), len(read[0][1][0]), separator) if reuses and len(read) > 1 else None,
    )


REUSED: Final = "passages keep the rows that were computed for each alone"


async def with_reused(prompts: PromptSet, kv: DocumentPrefiller | None) -> PromptSet:
    """The same prompts, whose passages in one context take their stored KV along."""
    if kv is None or prompts.pieces is None:
        return prompts
    found = await kv.joined(prompts.pieces)
    first = prompts.prefixes[:1]
    return replace(prompts, prefixes=first if found is None else (found,), pieces=None, reuses=found is not None)


class PeerScales:
    """Whether the relevance of two sides' documents can be compared: the same embedder at both, and the cloud's
    temperature. Where it cannot, the documents of each side together weigh the same (`PromptSet.with_equal_sides`),
    until the text shows which predict it better. Not handled: a link that comes with another scale in mid-answer.

    Kept by the peers' names: one that links anew stays who it is. own: this side's scale. follows: cosines are divided
    by what the peer divides them by, as a device does.
    """

    def __init__(self, own: RelevanceScale | None, *, follows: bool = False) -> None:
        self.temperature = RELEVANCE_TEMPERATURE if own is None else own.temperature
        self._own = own
        self._follows = follows
        self._told: dict[str, RelevanceScale | None] = {}

    def temperature_at(self, level: Privacy) -> float:
        """At a level of an answer: the cloud has no say in one that it has no part in."""
        return self._own.temperature if level == "local-only" and self._own is not None else self.temperature

    def told(self, peer: str, scale: RelevanceScale | None) -> None:
        """Of a new link. A difference is logged once, though links come and go."""
        is_news = self._told.get(peer) != scale
        self._told[peer] = scale
        if self._follows and scale is not None:
            self.temperature = scale.temperature
        if is_news and (different := self.difference(peer)):
            log.warning("in answers with %s %s", peer, different)

    def difference(self, peer: str | None) -> str:
        """A clause that says what differs between this side and what the peer told last; empty where nothing does, or
        one of them keeps no documents."""
        own, told = self._own, None if peer is None else self._told.get(peer)
        if own is None or told is None or own.embedder == told.embedder:
            return ""
        return "the documents of both sides weigh the same, since their embedders differ"
