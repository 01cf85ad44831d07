"""One side's document KV at work: looked up while a request is read, kept after a first use, filled while nothing runs.

Between `rag.document_kv`, which knows files, and `prefixes`, which knows the engine. The text of an answer does not
depend on it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine, LoadedModel, ModelInfo
from paceline.errors import EngineError, PacelineError
from paceline.rag.document_kv import DocumentKvStore, KvKey, text_hash
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.executor import SequenceOp
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix
from paceline.runtime.engine_loop.worker import EngineWorker

log = logging.getLogger("paceline.node")

WATCH_S = 2.0  # between two looks for documents that were added
_PAGE = 256  # passages looked at together
_MAX_WAITING = 1 << 29  # bytes of rows that wait to be written; beyond, they are computed again at another use
_ANY_QUESTION = ({"role": "user", "content": "?"},)  # preamble and document are the same for every question


def kv_key(model: ModelInfo, passage: Passage, tokens: tuple[int, ...]) -> KvKey:
    """tokens: of the preamble and of what is read of the passage"""
    return KvKey(text_hash(passages_text(passage)), f"{model.fingerprint} {model.dtype} {model.backend}", tokens)


class DocumentPrefiller:
    """`prefix` may be called on any thread, the rest belongs to the event loop. Close it after the worker."""

    def __init__(
        self, files: DocumentKvStore, documents: DocumentStore, worker: EngineWorker, model: LoadedModel
    ) -> None:
        info = model.engine.info
        self._files = files
        self._documents = documents
        self._worker = worker
        self._tokenizer = model.tokenizer
        self._info = info
        self._writer = ThreadPoolExecutor(1, "paceline-kv")
        self._lock = threading.Lock()
        self._waiting: dict[KvKey, int] = {}  # what is being written → its bytes
        self._seen = ""  # generation of the documents for which nothing is missing

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()

    def prefix(self, passage: Passage, tokens: tuple[int, ...]) -> StoredPrefix:
        """What prompts about this passage begin with: as it is stored, or to be stored when it has been computed."""
        key = kv_key(self._info, passage, tokens)
        rows = self._files.get(key)
        if rows is not None:
            return StoredPrefix(tokens, rows)
        return StoredPrefix(tokens, keep=lambda computed: self._keep(key, passage.chunk_id, computed))

    async def prefill_missing(self, busy: Callable[[], bool]) -> int:
        """Compute what is missing of all documents, a passage at a time, until `busy`. Returns how many that were.

        Ends too when the folder is full: then what is used stays, and nothing is computed on suspicion.
        """
        generation = await asyncio.to_thread(self._documents.generation)
        if generation == self._seen:
            return 0
        if not self._seen:  # what was removed while nobody could tell
            await asyncio.to_thread(self._files.retain, self._texts)
        computed = after = 0
        while page := await asyncio.to_thread(self._documents.passages, after, _PAGE):
            after = page[-1].chunk_id
            for passage in await asyncio.to_thread(self._missing, page):
                if busy():
                    return computed
                if not await self._compute(passage):
                    self._seen = generation
                    return computed
                computed += 1
        self._seen = generation
        return computed

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _texts(self) -> set[str]:
        texts: set[str] = set()
        after = 0
        while page := self._documents.passages(after, _PAGE):
            after = page[-1].chunk_id
            texts.update(text_hash(passages_text(passage)) for passage in page)
        return texts

    def _missing(self, page: list[Passage]) -> list[Passage]:
        """One passage for each text."""
        there = self._files.groups()
        missing: dict[str, Passage] = {}
        for passage in page:
            group = kv_key(self._info, passage, ()).group
            if group not in there:
                missing.setdefault(group, passage)
        return list(missing.values())

    async def _compute(self, passage: Passage) -> bool:
        """Prefill and keep one passage. False when the folder has no room for another."""
        key = await asyncio.to_thread(self._any_key, passage)
        if key is None:
            return True
        rows = await self._prefilled(key.tokens)
        if rows is None:
            return True
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._write_ahead, key, passage.chunk_id, rows)

    async def _prefilled(self, tokens: tuple[int, ...]) -> KvPrefix | None:
        """None where the engine cannot do it, for lack of room or otherwise."""
        seq, loop = self._worker.allocate(), asyncio.get_running_loop()
        found: asyncio.Future[KvPrefix | None] = loop.create_future()

        def deliver(rows: KvPrefix | None) -> None:
            if not found.done():  # cancelled meanwhile
                found.set_result(rows)

        def export(engine: Engine) -> None:
            rows = None
            try:
                rows = engine.export_kv(seq, tokens)
            finally:
                loop.call_soon_threadsafe(deliver, rows)

        def answered(result: tuple[Dist, ...] | EngineError) -> None:
            if isinstance(result, EngineError):
                deliver(None)
            else:
                self._worker.control(SequenceOp(seq, None, export))

        try:
            self._worker.forward(Segment(seq, 0, tokens, logits="none"), answered)
            return await found
        finally:
            self._worker.control(SequenceOp.release(seq))

    def _any_key(self, passage: Passage) -> KvKey | None:
        """Of the passage behind the preamble that a first question would have; None where it cannot be read so."""
        try:
            preamble, document, _ = self._tokenizer.document_prompt(_ANY_QUESTION, passages_text(passage))
        except PacelineError:  # a template that has no place for documents
            return None
        tokens = (*preamble, *document)
        return kv_key(self._info, passage, tokens) if 0 < len(tokens) < self._info.max_positions else None

    def _write_ahead(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> bool:
        """False, and nothing written, where something else would have to go for it."""
        if not self._files.has_room(rows):
            return False
        self._write(key, chunk_id, rows)
        return True

    def _keep(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> None:
        """On the engine's thread: hand over and return."""
        with self._lock:
            if key in self._waiting or sum(self._waiting.values()) + rows.num_bytes > _MAX_WAITING:
                return
            self._waiting[key] = rows.num_bytes
        self._writer.submit(self._write_waiting, key, chunk_id, rows)

    def _write_waiting(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> None:
        try:
            self._write(key, chunk_id, rows)
        except Exception:
            log.exception("KV of a document could not be kept")
        finally:
            with self._lock:
                del self._waiting[key]

    def _write(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> None:
        # A document that is removed while its rows are written must not leave them behind.
        if self._documents.holds(chunk_id) and self._files.put(key, rows) and not self._documents.holds(chunk_id):
            self._files.forget([key.text])
