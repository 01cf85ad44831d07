"""Document KV of one side: looked up while a request is prepared, stored after first use, prefilled while idle.

Connects `rag.document_kv`, which knows files, to `requests.PrefixReuse`, which knows the engine. The text of an answer
does not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.pending import LEAST_ALONE
from paceline.core.batching.segment import Segment
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import ModelInfo, Rotates, Sequences, ServedModel
from paceline.errors import EngineError, PacelineError
from paceline.rag.document_kv import DocumentKvStore, KvKey
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.requests import SequenceOp, StoredPrefix
from paceline.runtime.engine_loop.worker import Worker
from paceline.system import Threads

log = logging.getLogger("paceline.node")

WATCH_S = 2.0  # polling interval for added documents
LINKED: Final = 16  # first tokens of a passage, which are computed where it stands
_PAGE = 256  # passages read at a time
_MAX_PENDING_BYTES = 1 << 29  # of rows waiting to be written; beyond, they are dropped and computed at the next use
_ANY_QUESTION = ({"role": "user", "content": "?"},)  # preamble and document do not depend on the question


def kv_key(files: DocumentKvStore, model: ModelInfo, passage: Passage, tokens: tuple[int, ...]) -> KvKey:
    """Key of a passage's KV in these files. tokens: preamble, and passage as far as the prompt contains it."""
    name = f"{model.fingerprint} {model.kept_as} {model.dtype} {model.backend}"
    return KvKey(_text_hash(files, passage), name, tokens)


def _text_hash(files: DocumentKvStore, passage: Passage) -> str:
    return files.text_hash(passages_text(passage), passage.collection)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Passages that stand one behind the other in a prompt."""

    stored: tuple[StoredPrefix, ...]  # of each alone, behind the preamble
    preamble: int  # tokens
    separator: tuple[int, ...]  # between two of them


class DocumentPrefiller:
    """`prefix` may be called on any thread, all else on the event loop only. Close after the worker."""

    def __init__(self, files: DocumentKvStore, documents: DocumentStore, worker: Worker, model: ServedModel) -> None:
        info = model.engine.info
        self._files = files
        self._documents = documents
        self._worker = worker
        self._tokenizer = model.tokenizer
        self._info = info
        self._frequencies = engine.frequencies if isinstance(engine := model.engine, Rotates) else ()
        self.can_join = bool(self._frequencies)  # KV can be reused at other positions than it was computed for
        self._writer = Threads(1, "paceline-kv")
        self._lock = threading.Lock()
        self._pending: dict[KvKey, int] = {}  # KV being written → its bytes
        self._complete = ""  # generation of the documents whose KV is complete
        self._removals = 0  # after which no KV of removed ones is kept

    def close(self) -> None:
        """Wait until pending KV is written."""
        self._writer.shutdown()

    def prefix(self, passage: Passage, tokens: tuple[int, ...]) -> StoredPrefix:
        """Prefix of prompts about this passage: with its stored KV, or with a callback that stores it once computed."""
        key = kv_key(self._files, self._info, passage, tokens)
        rows = self._files.get(key)
        if rows is not None:
            return StoredPrefix(tokens, rows)
        return StoredPrefix(tokens, keep=lambda computed: self._keep(key, passage.chunk_id, computed))

    async def joined(self, pieces: Pieces) -> StoredPrefix | None:
        """KV of passages one behind the other, of what is stored of each alone: approximate, since a stored passage has
        not seen those before it. The first rows of each, on which later ones lean most, are computed where they stand
        (EPIC, arXiv:2410.15332). None where nothing can be reused."""
        first, *later = pieces.stored
        tokens, rows, reused = first.tokens, first.rows, False
        for piece in later:
            document = piece.tokens[pieces.preamble :]
            tokens += pieces.separator
            if piece.rows is None or len(document) <= LINKED:
                tokens += document
                continue
            tokens += document[:LINKED]
            rows = await self._prefill(tokens, rows)
            if rows is None:
                return None
            rows, reused = rows.followed_by(piece.rows, pieces.preamble + LINKED, self._frequencies), True
            tokens = rows.tokens
        return StoredPrefix(rows.tokens, rows) if reused and rows is not None else None

    async def prefill_missing(self, busy: Callable[[], bool]) -> int:
        """Prefill passages without stored KV, one at a time, until `busy`; returns their number.

        Also ends when the folder or the disk is full: KV is then stored at use only, never ahead.
        """
        generation = await asyncio.to_thread(self._documents.generation)
        if generation == self._complete:
            return 0
        # Others that share the store remove documents of which this server may keep something on its disk.
        removals = await asyncio.to_thread(self._documents.removals) if self._documents.home is not None else 0
        if not self._complete or removals != self._removals:
            # Documents may have been removed while the program was down, or at another server.
            await asyncio.to_thread(self._files.retain, self._texts)
            self._removals = removals
        computed = after = 0
        while page := await asyncio.to_thread(self._documents.passages, after, _PAGE):
            after = page[-1].chunk_id
            for passage in await asyncio.to_thread(self._missing, page):
                if busy():
                    return computed
                if not await self._compute(passage):
                    self._complete = generation
                    return computed
                computed += 1
        self._complete = generation
        return computed

    # ---- inside -----------------------------------------------------------------------------------------------------
    def _texts(self) -> set[str]:
        texts: set[str] = set()
        after = 0
        while page := self._documents.passages(after, _PAGE):
            after = page[-1].chunk_id
            texts.update(_text_hash(self._files, passage) for passage in page)
        return texts

    def _missing(self, page: list[Passage]) -> list[Passage]:
        """Passages of the page without stored KV, one for each text of a collection."""
        stored = self._files.groups()
        missing: dict[str, Passage] = {}
        for passage in page:
            group = kv_key(self._files, self._info, passage, ()).group
            if group not in stored:
                missing.setdefault(group, passage)
        return list(missing.values())

    async def _compute(self, passage: Passage) -> bool:
        """Prefill and store one passage. False when the folder or the disk has no room for it."""
        key = await asyncio.to_thread(self._any_key, passage)
        if key is None:
            return True
        rows = await self._prefill(key.tokens)
        if rows is None:
            return True
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, self._write_ahead, key, passage.chunk_id, rows)

    async def _prefill(self, tokens: tuple[int, ...], stored: KvPrefix | None = None) -> KvPrefix | None:
        """Prefill the tokens and export their KV; None where the engine fails, for lack of memory or otherwise. stored:
        of the first ones."""
        seq, loop = self._worker.allocate(), asyncio.get_running_loop()
        exported: asyncio.Future[KvPrefix | None] = loop.create_future()

        def deliver(rows: KvPrefix | None) -> None:
            if not exported.done():  # else cancelled
                exported.set_result(rows)

        def export(sequences: Sequences, _: int | None) -> None:
            rows = None
            try:
                rows = sequences.export_kv(seq, tokens)
            except EngineError as error:  # such as that an answer has needed its memory
                log.info("KV of a document is not stored ahead: %s", error)
            finally:
                loop.call_soon_threadsafe(deliver, rows)

        try:
            prefix = None if stored is None else StoredPrefix(stored.tokens, stored)
            await self._worker.compute(Segment(seq, 0, tokens, logits="none"), prefix=prefix)
            self._worker.submit(SequenceOp(seq, None, export))
            return await exported
        except EngineError:
            return None
        finally:
            self._worker.submit(SequenceOp.release(seq))

    def _any_key(self, passage: Passage) -> KvKey | None:
        """Key of the passage after the preamble of a first question; None where such a prompt is not possible."""
        try:
            preamble, document, _ = self._tokenizer.document_prompt(_ANY_QUESTION, passages_text(passage))
        except PacelineError:  # the chat template has no place for documents
            return None
        tokens = (*preamble, *document)
        return kv_key(self._files, self._info, passage, tokens) if 0 < len(tokens) < self._info.max_positions else None

    def _write_ahead(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> bool:
        """Write, unless other KV would have to be removed for it. False where it is not kept."""
        return self._files.has_room(rows) and self._write(key, chunk_id, rows)

    def _keep(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> None:
        """Called on the engine's thread: queue for the writer without waiting."""
        with self._lock:
            if key in self._pending or sum(self._pending.values()) + rows.num_bytes > _MAX_PENDING_BYTES:
                return
            self._pending[key] = rows.num_bytes
        self._writer.submit(self._write_pending, key, chunk_id, rows)

    def _write_pending(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> None:
        try:
            self._write(key, chunk_id, rows)
        except Exception:
            log.exception("KV of a document could not be kept")
        finally:
            with self._lock:
                del self._pending[key]

    def _write(self, key: KvKey, chunk_id: int, rows: KvPrefix) -> bool:
        """Write what is still wanted. False where it cannot be kept."""
        if self._holds(chunk_id, key):
            if not self._files.put(key, rows):
                return False
            if not self._holds(chunk_id, key):  # of a document that was removed during the write nothing may remain
                self._files.forget([key.text])
        return True

    def _holds(self, chunk_id: int, key: KvKey) -> bool:
        """Whether there is the chunk, and its text is what was read: not what a model has made of it, which removing
        the document would not reach."""
        passage = self._documents.chunks([chunk_id]).get(chunk_id)
        return passage is not None and _text_hash(self._files, passage) == key.text


_calibration_log = logging.getLogger("paceline.engine")

PREFIX: Final = 16  # rows before the timed ones
ROWS: Final = (1, 2, 4, 8, 16, 32, LEAST_ALONE)
REPEATS: Final = 3  # forwards per row count; the first is a warm-up and not reported
MAX_S: Final = 0.5  # no row count is timed that would end later: nobody waits long for the start of a slow engine
_TOKEN: Final = 1

Timed = tuple[int, float]


async def forward_times(worker: Worker, vocab_size: int) -> list[Timed]:
    """Measure (rows, seconds) of sampled forwards of one sequence at the start, in order of rows, so that the draft
    budget is known from the first step of the first answer; fewer on a slow engine, none on an EngineError. Live
    measurements replace them gradually (`core.drafting.budget.OnlineStats`). Runs on the loop of the worker, which
    should be idle.
    """
    loop = asyncio.get_running_loop()
    seq = worker.allocate()
    times: list[Timed] = []
    greedy = RowSampling(SamplingParams(temperature=0.0), 0, vocab_size)
    began = loop.time()
    try:
        await worker.compute(Segment(seq, 0, (_TOKEN,) * PREFIX))
        for rows in ROWS:
            before = loop.time()
            for repeat in range(REPEATS):
                submitted = loop.time()
                segment = Segment(seq, PREFIX, (_TOKEN,) * rows, logits="all")
                await worker.rows(segment, sampling=(greedy,) * rows)
                if repeat:
                    times.append((rows, loop.time() - submitted))
                worker.submit(SequenceOp.truncate(seq, PREFIX))
            ended = loop.time()
            if ended - began + 2 * (ended - before) > MAX_S:  # of twice the rows
                break
    except EngineError as error:
        _calibration_log.info("forwards could not be timed: %s", error)
    finally:
        worker.submit(SequenceOp.release(seq))
    return times
