"""Prefixes of prompts that need not be computed: cached by the engine, or KV of documents that the caller has stored.

Runs on the engine's thread, between `StepExecutor` and the engine. Knows no files: the caller provides and stores rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.scheduler import ScheduledSegment
from paceline.core.batching.segment import Segment, SeqId
from paceline.errors import EngineError
from paceline.runtime.engine_loop.sequence_records import Sequences

log = logging.getLogger("paceline.engine")


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Preamble and document at the start of a prompt."""

    tokens: tuple[int, ...]
    rows: KvPrefix | None = None  # stored KV
    keep: Callable[[KvPrefix], None] | None = None  # receives computed KV on the engine's thread; must not wait

    def begins(self, segment: Segment) -> bool:
        """True if the segment starts with this prefix and has rows left to compute."""
        rows = len(self.tokens)
        whole = segment.start == 0 and segment.parents is None and segment.logits != "all"
        return whole and rows < len(segment.tokens) and segment.tokens[:rows] == self.tokens


class Prompt(Protocol):
    """A request for a forward, as far as its beginning matters."""

    segment: Segment
    prefix: StoredPrefix | None
    salt: str | None  # owner within which rows are shared; None: they are not
    cached_rows: int  # set when the sequence begins


class PrefixReuse:
    """Prefixes of the requests of one `StepExecutor`, by their keys."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._prompts: dict[int, Prompt] = {}  # that may begin with rows that need not be computed
        self._computing: dict[tuple[str, tuple[int, ...]], int] = {}  # salt and tokens of prompts in progress
        self._keeping: dict[int, StoredPrefix] = {}
        self._computed: list[tuple[SeqId, StoredPrefix]] = []
        self.adopted = 0  # rows not computed

    def add(self, key: int, prompt: Prompt) -> None:
        """Register a segment, whatever it is."""
        segment, prefix = prompt.segment, prompt.prefix
        if segment.start or segment.parents is not None or segment.logits == "all" or len(segment.tokens) < 2:
            return
        stored = prefix is not None and prefix.begins(segment)
        if prompt.salt is not None or (stored and prefix is not None and prefix.rows is not None):
            self._prompts[key] = prompt
        if stored and prefix is not None and prefix.rows is None and prefix.keep is not None:
            self._keeping[key] = prefix

    def begin(self, key: int, segment: Segment) -> int | None:
        """Start the sequence of a prompt; the number of its rows that need not be computed.

        segment: as it is scheduled; a prompt that has been shortened since `add` is computed whole. None while the same
        prompt of the same owner is being computed: its rows are shared once they are there.
        """
        prompt = self._prompts.get(key)
        if prompt is None or len(segment.tokens) < len(prompt.segment.tokens):
            return 0
        prefix = prompt.prefix
        if prompt.salt is not None and self._computing.setdefault((prompt.salt, segment.tokens), key) != key:
            return None
        stored = prefix.rows if prefix is not None and prefix.begins(segment) else None
        try:
            if prompt.salt is not None:
                rows = self._sequences.begin(segment.seq, segment.tokens, prompt.salt, stored)
            elif stored is not None:
                self._sequences.import_kv(segment.seq, stored)
                rows = len(stored.tokens)
            else:
                rows = 0
        except EngineError as error:
            log.warning("rows of a prompt are computed again: %s", error)
            rows = 0
        self.adopted += rows
        prompt.cached_rows = rows
        return rows

    def done(self, chunk: ScheduledSegment) -> None:
        """Called when the last chunk of a request has run."""
        if (prefix := self._keeping.pop(chunk.key, None)) is not None:
            self._computed.append((chunk.segment.seq, prefix))

    def export(self) -> None:
        """Export the prefixes computed since the last call. After the answers are sent, before any sequence changes."""
        for seq, prefix in self._computed:
            try:
                if prefix.keep is not None:
                    prefix.keep(self._sequences.export_kv(seq, prefix.tokens))
            except Exception as error:  # the answer does not depend on storing
                log.warning("the rows of a document cannot be kept: %s", error)
        self._computed.clear()

    def interrupt(self, seq: SeqId) -> None:
        """A sequence loses its rows: other prompts no longer wait for them."""
        for ident, key in list(self._computing.items()):
            if self._prompts[key].segment.seq == seq:
                del self._computing[ident]

    def forget(self, key: int) -> None:
        prompt = self._prompts.pop(key, None)
        self._keeping.pop(key, None)
        if prompt is not None and prompt.salt is not None:
            ident = prompt.salt, prompt.segment.tokens
            if self._computing.get(ident) == key:
                del self._computing[ident]
