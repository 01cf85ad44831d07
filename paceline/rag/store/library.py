"""Files and vector stores of one side: the facade for the HTTP API and for generation.

Works on the rows and the index of one `DocumentStore`, through a connection of its own. Methods block on the disk and
may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeVar

from paceline.errors import RequestError
from paceline.rag.database import Database, SharedConnection
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.index.bm25 import rank_fusion
from paceline.rag.parsing.pool import ParserBudget
from paceline.rag.records import Passage, Selection, Zone
from paceline.rag.store.document_rows import ShownPassage, find_chunks, find_passage, find_text
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.file_work import Anywhere, FileWork
from paceline.rag.store.files import StoredFile, Uploads
from paceline.rag.store.filters import Attributes, AttributesOf, Filter
from paceline.rag.store.ingester import Ingester
from paceline.rag.store.vector_stores import FileBatch, FileSpec, VectorStore, VectorStoreFile, VectorStores

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found by a search of vector stores."""

    passage: Passage  # its `score` is the cosine, 0 where that is negative
    attributes: Attributes  # of its file in that store


class Library:
    """Open until `close`. Attached files are read into their stores between `start` and `close`."""

    def __init__(self, documents: DocumentStore, zone: Zone, work: FileWork | None = None) -> None:
        """`zone`: this side's, given to every document. work: where files are read in; None: anywhere. Raises
        ConfigError when the folder cannot be used."""
        embedder = documents.embedder
        self.zone: Zone = zone
        self._documents = documents
        database = Database(documents.directory, embedder=embedder.name, dimensions=embedder.dimensions)
        self._connection = SharedConnection(database)
        try:
            self.uploads = Uploads(documents.directory, self._connection)
        except BaseException:
            self._connection.close()
            raise
        self.stores = VectorStores(self._connection)
        self._document_kv = DocumentKvStore(documents.directory / FOLDER, 0, seal=database.seal)  # only to remove from
        self.budget = ParserBudget()  # of reading files, in stores and in messages
        work = work or Anywhere()
        self._ingester = Ingester(
            self._connection, self.uploads, documents, self._document_kv, embedder, zone, work, self.budget
        )

    def start(self) -> None:
        self._ingester.start()

    def close(self) -> None:
        """Stop reading files, after the batch of chunks being embedded, and close the connection."""
        self._ingester.stop()
        self._connection.close()

    # ---- files ------------------------------------------------------------------------------------------------------
    def upload(self, owner: str, name: str, purpose: str, content: BinaryIO) -> StoredFile:
        return self.uploads.add(owner, name, purpose, content)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete an uploaded file and remove it from every vector store."""
        self._forget(self.stores.forget_file(owner, file_id))
        self.uploads.remove(file_id)

    # ---- vector stores ----------------------------------------------------------------------------------------------
    def create_store(self, owner: str, name: str, metadata: dict[str, str], files: Sequence[FileSpec]) -> VectorStore:
        return self._notified(self.stores.create(owner, name, metadata, files))

    def attach(self, owner: str, store_id: str, file: FileSpec) -> VectorStoreFile:
        return self._notified(self.stores.attach(owner, store_id, file))

    def create_batch(self, owner: str, store_id: str, files: Sequence[FileSpec]) -> FileBatch:
        return self._notified(self.stores.create_batch(owner, store_id, files))

    def delete_store(self, owner: str, store_id: str) -> None:
        self._forget(self.stores.delete(owner, store_id))

    def detach(self, owner: str, store_id: str, file_id: str) -> None:
        self._forget(self.stores.detach(owner, store_id, file_id))

    def text(self, owner: str, store_id: str, file_id: str) -> str:
        """The text read from a file. Raises RequestError unless the reading is completed, and (404) where it is
        removed meanwhile."""
        attached = self.stores.attached(owner, store_id, file_id)
        if attached.status != "completed":
            raise RequestError(f"This file's text cannot be given: it is {attached.status}.", param="file_id")
        with self._connection.reading() as database:
            text = find_text(database, store_id, file_id)
        if text is None:
            raise RequestError("This file is not here any more.", status=404, code="not_found", param="file_id")
        return text

    # ---- searching --------------------------------------------------------------------------------------------------
    def selection(
        self, owner: str, store_ids: Sequence[str], condition: Filter | None = None
    ) -> tuple[Selection, AttributesOf]:
        """The `collections` and `document_ids` of a `GenerateRequest` that names these stores, and their files'
        attributes.

        `default` names the documents managed by `paceline docs`. Raises RequestError (404) for a store that the owner
        does not have.
        """
        return self.stores.selection(owner, store_ids, condition)

    def search(
        self,
        owner: str,
        store_ids: Sequence[str],
        queries: Sequence[str],
        k: int,
        *,
        condition: Filter | None = None,
        min_score: float = 0.0,
    ) -> list[Hit]:
        """Search files: at most k passages of at least this score, best first; rankings of several queries are fused.

        Raises RequestError (404) for a store that the owner does not have.
        """
        selection, attributes = self.stores.selection(owner, store_ids, condition)
        found: dict[int, Passage] = {}  # by chunk id, with the best score of any query
        rankings = []
        for query in queries:
            passages = self._documents.search(query, k, selection, min_score=min_score if min_score > 0 else -1.0)
            rankings.append([passage.chunk_id for passage in passages])
            for passage in passages:
                if passage.chunk_id not in found or passage.score > found[passage.chunk_id].score:
                    found[passage.chunk_id] = passage
        return [_hit(found[chunk_id], attributes) for chunk_id in rank_fusion(*rankings)[:k]]

    def passages(self, chunk_ids: Collection[int]) -> dict[int, tuple[str, str]]:
        """(text, place) of those of these chunks that exist, of any owner. For answers whose owner has read them."""
        with self._connection.reading() as database:
            return find_chunks(database, chunk_ids)

    def passage(self, owner: str, chunk_id: int) -> ShownPassage:
        """A passage of the managed documents or of a store of this owner, in its document.

        Raises RequestError (404) for any other.
        """
        with self._connection.reading() as database:
            shown = find_passage(database, owner, chunk_id)
        if shown is None:
            raise RequestError("This passage is not here, or not any more.", status=404, code="not_found", param="id")
        return shown

    # ---- internal ---------------------------------------------------------------------------------------------------
    def _forget(self, text_hashes: set[str]) -> None:
        """Erase what was removed from the disk before returning. A new index file is written later."""
        self._document_kv.forget(text_hashes)
        self._connection.checkpoint()
        self._documents.drop_index_file()
        self._ingester.schedule_save()

    def _notified(self, result: T) -> T:
        """Return the result after waking the ingester."""
        self._ingester.notify()
        return result


def _hit(passage: Passage, attributes: AttributesOf) -> Hit:
    return Hit(replace(passage, score=max(passage.score, 0.0)), attributes(passage.collection, passage.file_id))
