"""The rows that prompts about one document begin with: adopted where they are stored, exported to be stored where not.

On the engine's thread, between `Steps` and the engine. Knows no files: where rows come from and go to is the caller's.
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
    """Preamble and document."""

    tokens: tuple[int, ...]
    rows: KvPrefix | None = None  # as they were stored
    keep: Callable[[KvPrefix], None] | None = None  # where to put them once computed; on the engine's thread, at once

    def begins(self, segment: Segment) -> bool:
        """Is it the start of this segment, with something left to compute?"""
        rows = len(self.tokens)
        whole = segment.start == 0 and segment.parents is None and segment.logits != "all"
        return whole and rows < len(segment.tokens) and segment.tokens[:rows] == self.tokens


class PrefixReuse:
    """Of the requests that one `Steps` holds, by its keys."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adopting: dict[int, KvPrefix] = {}
        self._keeping: dict[int, StoredPrefix] = {}
        self._computed: list[tuple[SeqId, StoredPrefix]] = []
        self.adopted = 0  # rows so far that were not computed

    def add(self, key: int, segment: Segment, prefix: StoredPrefix | None) -> int:
        """How many first rows of the segment need not be computed."""
        if prefix is None or not prefix.begins(segment):
            return 0
        if prefix.rows is not None:
            self._adopting[key] = prefix.rows
            return len(prefix.tokens)
        if prefix.keep is not None:
            self._keeping[key] = prefix
        return 0

    def adopt(self, pieces: Sequence[ScheduledSegment]) -> tuple[ScheduledSegment, ...]:
        """Give the engine the rows these pieces build on; what it refuses is computed after all."""
        return tuple(self._begun(piece) for piece in pieces)

    def _begun(self, piece: ScheduledSegment) -> ScheduledSegment:
        rows, segment = self._adopting.pop(piece.key, None), piece.segment
        if rows is None or segment.start != len(rows.tokens):
            return piece
        try:
            self._engine.import_kv(segment.seq, rows)
        except EngineError as error:
            log.warning("stored rows of a document are computed again: %s", error)
            whole = Segment(segment.seq, 0, rows.tokens + segment.tokens, None, segment.logits)
            return replace(piece, segment=whole)
        self.adopted += len(rows.tokens)
        return piece

    def done(self, piece: ScheduledSegment) -> None:
        """The last piece of a request has run."""
        if (prefix := self._keeping.pop(piece.key, None)) is not None:
            self._computed.append((piece.segment.seq, prefix))

    def export(self) -> None:
        """Hand over the rows of what was computed since: after the answers are out, before a sequence is changed."""
        for seq, prefix in self._computed:
            try:
                if prefix.keep is not None:
                    prefix.keep(self._engine.export_kv(seq, prefix.tokens))
            except Exception as error:  # a document is read without its rows being kept
                log.warning("the rows of a document cannot be kept: %s", error)
        self._computed.clear()

    def forget(self, key: int) -> None:
        self._adopting.pop(key, None)
        self._keeping.pop(key, None)
