"""KV of document prefixes of prompts: imported where it is stored, exported for storing where it is not.

Runs on the engine's thread, between `StepExecutor` and the engine. Knows no files: the caller provides and stores rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.scheduler import ScheduledSegment
from paceline.core.batching.segment import Segment, SeqId
from paceline.engine.base import Engine
from paceline.errors import EngineError

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Preamble and document at the start of a prompt."""

    tokens: tuple[int, ...]
    rows: KvPrefix | None = None  # stored KV
    keep: Callable[[KvPrefix], None] | None = None  # receives computed KV on the engine's thread; must not wait

    def begins(self, segment: Segment) -> bool:
        """Whether the segment starts with this prefix and has rows left to compute."""
        rows = len(self.tokens)
        whole = segment.start == 0 and segment.parents is None and segment.logits != "all"
        return whole and rows < len(segment.tokens) and segment.tokens[:rows] == self.tokens


class PrefixReuse:
    """Prefixes of the requests of one `StepExecutor`, by their keys."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adopting: dict[int, KvPrefix] = {}
        self._keeping: dict[int, StoredPrefix] = {}
        self._computed: list[tuple[SeqId, StoredPrefix]] = []
        self.adopted = 0  # rows imported instead of computed

    def add(self, key: int, segment: Segment, prefix: StoredPrefix | None) -> int:
        """Register a segment; the number of its first rows that need not be computed."""
        if prefix is None or not prefix.begins(segment):
            return 0
        if prefix.rows is not None:
            self._adopting[key] = prefix.rows
            return len(prefix.tokens)
        if prefix.keep is not None:
            self._keeping[key] = prefix
        return 0

    def adopt(self, chunks: Sequence[ScheduledSegment]) -> tuple[ScheduledSegment, ...]:
        """Import the stored rows before these segments; rows that the engine refuses are computed instead."""
        return tuple(self._import(chunk) for chunk in chunks)

    def _import(self, chunk: ScheduledSegment) -> ScheduledSegment:
        rows, segment = self._adopting.pop(chunk.key, None), chunk.segment
        if rows is None or segment.start != len(rows.tokens):
            return chunk
        try:
            self._engine.import_kv(segment.seq, rows)
        except EngineError as error:
            log.warning("stored rows of a document are computed again: %s", error)
            whole = Segment(segment.seq, 0, rows.tokens + segment.tokens, None, segment.logits)
            return replace(chunk, segment=whole)
        self.adopted += len(rows.tokens)
        return chunk

    def done(self, chunk: ScheduledSegment) -> None:
        """Called when the last chunk of a request has run."""
        if (prefix := self._keeping.pop(chunk.key, None)) is not None:
            self._computed.append((chunk.segment.seq, prefix))

    def export(self) -> None:
        """Export the prefixes computed since the last call. After the answers are sent, before any sequence changes."""
        for seq, prefix in self._computed:
            try:
                if prefix.keep is not None:
                    prefix.keep(self._engine.export_kv(seq, prefix.tokens))
            except Exception as error:  # the answer does not depend on storing
                log.warning("the rows of a document cannot be kept: %s", error)
        self._computed.clear()

    def forget(self, key: int) -> None:
        self._adopting.pop(key, None)
        self._keeping.pop(key, None)
