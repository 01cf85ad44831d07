"""A store's documents as one reader may see them: what the owner's rules bar is not found, shown or counted.

The rules of each document are worked out anew when documents change. What a search finds is looked at once more after
it, as documents may have come meanwhile; one of which nothing is known is one that never leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import DocumentFacts, DocumentRule, Pattern, Policy
from paceline.errors import RequestError
from paceline.rag.embedder import Embedder
from paceline.rag.prompt import passages_text
from paceline.rag.records import MANAGED, MIN_SCORE, Passage, Selection
from paceline.rag.store.documents import DocumentStore


@dataclass(frozen=True, slots=True)
class RuledDocument:
    """A document with the rules that hold for it. identity: by which its owner's confirmation is remembered."""

    id: str
    name: str
    identity: str
    facts: DocumentFacts
    rules: tuple[DocumentRule, ...]

    @property
    def is_asked_for(self) -> bool:
        return any(each.rule == "ask me" for each in self.rules)


_NOTHING_KNOWN: Final = DocumentRule("never leaves", Pattern.parse("(not known)", "/"))
UNKNOWN: Final = RuledDocument("", "a document", "", DocumentFacts(()), (_NOTHING_KNOWN,))


class Known(NamedTuple):
    generation: str
    by_id: Mapping[str, RuledDocument]
    by_passage: Mapping[tuple[str, str], RuledDocument]  # collection, and `Passage.file_id`
    ruled: Sequence[RuledDocument] = ()  # those with a rule

    def of(self, passage: Passage) -> RuledDocument:
        return self.by_passage.get((passage.collection, passage.file_id), UNKNOWN)


@dataclass(eq=False, repr=False)
class RuledDocuments:
    """All documents of a store. Safe to use from several threads."""

    store: DocumentStore
    policy: Policy
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: Known = field(default_factory=lambda: Known("", {}, {}))

    def known(self) -> Known:
        """As they are now. Reads the disk. Raises ConfigError."""
        with self._lock:
            if self._known.generation != self.store.generation():
                generation, rows = self.store.described()
                found = {key: self._ruled(key, collection, file, facts) for key, collection, file, facts in rows}
                passages = {(collection, file): found[key] for key, collection, file, _ in rows}
                ruled = [each for each in found.values() if each.rules]
                self._known = Known(generation, found, passages, ruled)
            return self._known

    def _ruled(self, key: str, collection: str, file: str, facts: DocumentFacts | None) -> RuledDocument:
        if facts is None:
            return replace(UNKNOWN, id=key)
        before = self._known.by_id.get(key)
        if before is not None and before.facts == facts:
            return before
        identity = facts.paths[0] if facts.paths and not facts.stores else f"{collection} {file}"
        return RuledDocument(key, facts.paths[-1] if facts.paths else key, identity, facts, self.policy.of(facts))


@dataclass(eq=False, repr=False)
class Readable:
    """The part of a store that one reader may read. Safe to use from several threads, as the store is.

    ruled: None: no rule says anything of documents. bars: this reader does not read it. asks: it would, once its owner
    has confirmed it. told: called with a text that the reader is given, and its rules. bars_others: also of documents
    without a rule some are not read.
    """

    store: DocumentStore
    ruled: RuledDocuments | None
    bars: Callable[[RuledDocument], bool]
    asks: Callable[[RuledDocument], bool]
    told: Callable[[str, Sequence[DocumentRule]], object]
    bars_others: bool = False
    asked: dict[str, str] = field(default_factory=dict)  # names of documents that would have been found, by id
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _found: dict[DocumentRule, None] = field(default_factory=dict)

    @property
    def embedder(self) -> Embedder:
        return self.store.embedder

    def selection(self, selection: Selection = MANAGED) -> Selection:
        """What of it is searched."""
        if self.ruled is None:
            return selection
        known = self.ruled.known()
        documents = known.by_id.values() if self.bars_others else known.ruled
        barred = frozenset(each.id for each in documents if self.bars(each))
        return replace(selection, barred=selection.barred | barred)

    def count(self, selection: Selection = MANAGED) -> int:
        return self.store.count(self.selection(selection))

    def search(
        self,
        query: str,
        k: int,
        selection: Selection = MANAGED,
        *,
        min_score: float = MIN_SCORE,
        vector: NDArray[np.float32] | None = None,
    ) -> list[Passage]:
        """As `DocumentStore.search`."""
        return self._found_in(
            selection, lambda within: self.store.search(query, k, within, min_score=min_score, vector=vector)
        )

    def whole(self, selection: Selection = MANAGED) -> list[Passage]:
        """As `DocumentStore.whole`."""
        return self._found_in(selection, self.store.whole)

    def _found_in(self, selection: Selection, find: Callable[[Selection], list[Passage]]) -> list[Passage]:
        found = self._given(find(self.selection(selection)))
        if self.ruled is None:
            return found
        known = self.ruled.known()
        asking = {each.id for each in known.ruled if self.asks(each)}
        if selection.document_ids is not None:
            asking &= selection.document_ids
        if asking:
            for passage in find(Selection(selection.collections, frozenset(asking))):
                self.asked[known.of(passage).id] = known.of(passage).name
        return found

    def around(self, chunk_id: int, count: int) -> list[Passage]:
        """As `DocumentStore.around`."""
        return self._given(self.store.around(chunk_id, count))

    def outline(self, selection: Selection, most: int) -> list[tuple[str, int]]:
        """As `DocumentStore.outline`."""
        return self.store.outline(self.selection(selection), most)

    def _given(self, passages: list[Passage]) -> list[Passage]:
        """Those of these that the reader is given."""
        if self.ruled is None:
            return passages
        known = self.ruled.known()
        found = [passage for passage in passages if not self.bars(known.of(passage))]
        self.rules(found)
        return found

    def rules(self, passages: Iterable[Passage] = ()) -> tuple[DocumentRule, ...]:
        """Of all that was found so far, and of these passages, whose texts the reader is given."""
        if self.ruled is None:
            return ()
        known = self.ruled.known()
        with self._lock:
            for passage in passages:
                rules = known.of(passage).rules if passage.collection else ()  # else it is of no document here
                self._found |= dict.fromkeys(rules)
                if rules:
                    self.told(passages_text(passage), rules)
            return tuple(self._found)

    def of(self, passage: Passage) -> RuledDocument | None:
        """Its document; None where no rule says anything of documents."""
        return None if self.ruled is None else self.ruled.known().of(passage)

    def hides(self, passage: Passage) -> bool:
        """True if this reader is not to know that it is there."""
        document = self.of(passage)
        return document is not None and self.bars(document) and not self.asks(document)

    def admit(self, passage: Passage, *texts: str) -> None:
        """Raises RequestError for a passage that is not shown to this reader. texts: of it, and around it."""
        if self.ruled is None:
            return
        document = self.ruled.known().of(passage)
        if self.bars(document):
            raise not_read(document, asks=self.asks(document))
        if document.rules:
            self.told("\n".join((passages_text(passage), *texts)), document.rules)

    def admit_file(self, name: str, text: str, file_id: str | None = None) -> None:
        """Likewise for a file that comes with a message: by its name, and as what it is in stores, if it is in any."""
        if self.ruled is None:
            return
        rules = dict.fromkeys(self.ruled.policy.of(DocumentFacts((name,))))
        for (_, file), document in self.ruled.known().by_passage.items():
            if file == file_id:
                rules |= dict.fromkeys(document.rules)
                if self.asks(document):
                    raise not_read(document, asks=True)
        if rules:
            self.told(text, tuple(rules))

    def documents(self) -> list[RuledDocument]:
        """All that this reader may read, and all that it may once they are confirmed."""
        known = () if self.ruled is None else self.ruled.known().by_id.values()
        return [each for each in known if not self.bars(each) or self.asks(each)]


def unruled(store: DocumentStore) -> Readable:
    """All of a store."""
    return Readable(store, None, lambda _: False, lambda _: False, lambda _, __: None)


def not_read(document: RuledDocument, *, asks: bool) -> RequestError:
    sentence = "This document is not read here, by a rule of this side's owner."
    if asks:
        sentence = f"{document.name} is not read here: its owner has not confirmed it yet (paceline policy allow)."
    return RequestError(sentence, status=403, code="policy_forbids")
