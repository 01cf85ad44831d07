"""transformers' model modules with our attention and our KV: one forward is one flat row of tokens of many sequences.

KV lives in blocks with reference counts, so forks share their prefix and copy a block only when they write to it.
Rows that a sliding window has left stay stored until their sequence ends. Models whose layers differ in their K/V
shapes, or that need more than masks of windows, are refused by `paged_engine` with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from paceline.core.batching.block_manager import BlockManager, SlotArray
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import ModelInfo, Output
from paceline.engine.model_config import MASKED_KINDS, windows
from paceline.engine.paged.attention import NAME, AttentionMetadata, KvStorage, LayerAttention, SegmentSlots, attention
from paceline.engine.paged.packed_linear import pack
from paceline.engine.self_test import agrees, prompt_for
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.tensors import dists, kv_from_tensors, kv_to_tensors
from paceline.errors import EngineError

BLOCK_SIZE = 16  # rows
_SHARE = 0.25  # of the free memory goes to KV
_MOST_ROWS = 1 << 17  # as many as KV gets if memory would allow more


class _Recorder:
    """Stands in for a plan in the first forward: notes what each layer asks, and answers with zeros."""

    def __init__(self) -> None:
        self.hows: dict[int, LayerAttention] = {}
        self.shapes: set[tuple[int, int, int]] = set()
        self.like: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self.hows[layer] = how
        self.shapes.add((key.shape[1], key.shape[2], value.shape[2]))
        self.like = key
        return query.new_zeros(*query.shape[:2], value.shape[2])


class PagedKvCache:
    """The KV of one model, or of a span of its layers, and the sequences that own it.

    What `PagedEngine` and a stage share: admission, blocks, and the plan of a forward.
    """

    def __init__(self, info: ModelInfo, storage: KvStorage, num_blocks: int) -> None:
        self._model = info.fingerprint
        self._storage = storage
        self._pool = BlockManager(num_blocks, BLOCK_SIZE)
        self._ledger = SequenceTable(vocab_size=info.vocab_size, max_positions=info.max_positions)

    def allocate(self, batch: Batch) -> AttentionMetadata:
        """Room for the batch's rows. Raises EngineError and leaves everything as it was."""
        self._ledger.validate(batch)
        spans: list[SegmentSlots] = []
        slots: list[SlotArray] = []
        first = 0
        try:
            for segment in batch.segments:
                n = len(segment.tokens)
                self._storage.copy(self._pool.reserve(segment.seq, n))
                slots.append(self._pool.slot_mapping(segment.seq, segment.start, segment.start + n))
                spans.append(
                    SegmentSlots(segment, first, np.array(self._pool.block_table(segment.seq), dtype=np.int64))
                )
                first += n
        except EngineError:
            self.roll_back(batch)
            raise
        return AttentionMetadata(self._storage, spans, np.concatenate(slots))

    def roll_back(self, batch: Batch) -> None:
        """Take back what `begin` has given."""
        for segment in batch.segments:
            if segment.seq in self._ledger:
                self._pool.truncate(segment.seq, segment.start)
            else:
                self._pool.release(segment.seq)

    def written(self, batch: Batch) -> None:
        self._ledger.written(batch)

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        kept = self._ledger.commit(seq, keep, rest)
        if kept.order != tuple(range(len(kept.order))):
            # No other sequence holds these slots: they were written by this one, and an open tree is never forked.
            slots = self._pool.slot_mapping(seq, kept.first, kept.first + kept.size)
            self._storage.move_rows(slots[list(kept.order)], slots[: len(kept.order)])
        self._pool.truncate(seq, kept.first + len(kept.order))

    def truncate(self, seq: SeqId, length: int) -> None:
        known = self._ledger.length(seq)
        self._ledger.truncate(seq, length)
        if length < known:
            self._pool.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._ledger.fork(seq, into)
        self._pool.fork(seq, into)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._ledger.export(seq, len(tokens))
        return kv_from_tensors(
            self._model, tokens, *self._storage.read_rows(self._pool.slot_mapping(seq, 0, len(tokens)))
        )

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        num_rows, storage = len(rows.tokens), self._storage
        shapes = ((len(tensor), num_rows, *tensor.shape[2:]) for tensor in (storage.keys, storage.values))
        keys, values = kv_to_tensors(rows, self._model, *shapes, dtype=storage.keys.dtype)
        self._ledger.adopt(seq, rows.tokens)
        try:
            self._pool.reserve(seq, num_rows)
        except EngineError:
            self._ledger.release(seq)
            raise
        storage.write_rows(self._pool.slot_mapping(seq, 0, num_rows), keys, values)

    def release(self, seq: SeqId) -> None:
        self._ledger.release(seq)
        self._pool.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._ledger.length(seq)

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    def free_rows(self) -> int:
        return self._pool.free_rows()

    def check(self) -> None:
        self._pool.check()
        for seq, rows in self._ledger.lengths().items():
            assert self._pool.length(seq) == rows, (seq, self._pool.length(seq), rows)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as one flat row of tokens."""

    tokens: Tensor  # (1, rows)
    positions: Tensor  # (1, rows)
    wanted: Tensor  # (wanted,) rows whose distributions are asked for

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        wanted: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for segment in batch.segments:
            wanted += [len(tokens) + row for row in segment.logits_rows()]
            tokens += segment.tokens
            positions += segment.positions()
        as_tensor = partial(torch.tensor, dtype=torch.long, device=device)
        return cls(as_tensor([tokens]), as_tensor([positions]), as_tensor(wanted))


def output_of(batch: Batch, logits: Tensor) -> Output:
    """logits: (wanted, vocab), in the order of the batch's segments and their rows"""
    if len(logits) != sum(len(segment.logits_rows()) for segment in batch.segments):
        raise EngineError(f"the model scored {len(logits)} rows, not those that were asked for")
    found = iter(dists(logits))
    return Output(tuple(tuple(next(found) for _ in segment.logits_rows()) for segment in batch.segments))


class PagedEngine:
    """The engine contract on a model whose attention is ours. Made by `paged_engine`."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, rows: PagedKvCache) -> None:
        self._model, self._info, self._rows = model, info, rows

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        return output_of(batch, self.scores(batch))

    def scores(self, batch: Batch) -> Tensor:
        """(wanted, vocab): what `forward` does but for turning scores into distributions."""
        plan = self._rows.allocate(batch)
        try:
            with torch.inference_mode():
                logits = self._logits(batch, plan)
        except RuntimeError as error:  # what torch raises when memory runs out
            self._rows.roll_back(batch)
            raise EngineError(f"the model could not run: {error}") from error
        self._rows.written(batch)
        return logits

    def _logits(self, batch: Batch, plan: AttentionMetadata) -> Tensor:
        """(wanted, vocab)"""
        flat = FlatBatch.of(batch, self._model.device)
        output = self._model(
            input_ids=flat.tokens, position_ids=flat.positions, logits_to_keep=flat.wanted, use_cache=False, plan=plan
        )
        logits: Tensor = output.logits[0]
        return logits

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        self._rows.commit(seq, keep, rest)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._rows.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._rows.fork(seq, into)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        return self._rows.export_kv(seq, tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._rows.import_kv(seq, rows)

    def release(self, seq: SeqId) -> None:
        self._rows.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._rows.length(seq)

    @property
    def block_size(self) -> int:
        return BLOCK_SIZE

    def free_rows(self) -> int:
        return self._rows.free_rows()

    def check(self) -> None:
        self._rows.check()


def paged_engine(model: PreTrainedModel, info: ModelInfo, *, kv_rows: int | None = None) -> PagedEngine | str:
    """An engine that takes `model` over, or the reason why this architecture cannot be served so.

    Tried on a short prompt against the model's plain forward. The model is changed either way.
    """
    kinds = windows(model.config)
    if unknown := kinds.keys() - MASKED_KINDS:
        return f"it has layers of the kind {', '.join(sorted(unknown))}"
    prompt = prompt_for(kinds, info)
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=model.device)
        plain = dists(model(input_ids=ids, use_cache=False).logits[0])
    try:
        rows = patch_model(model, info, kv_rows=kv_rows)
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        return f"its attention is not of the common kind ({error})"
    engine = PagedEngine(model, replace(info, backend="paged"), rows)
    if not agrees(engine, prompt, plain, model.dtype):
        return "its scores differ from those of its plain forward"
    return engine


def patch_model(
    model: PreTrainedModel,
    info: ModelInfo,
    *,
    kv_rows: int | None = None,
    probe: dict[str, Tensor] | None = None,
) -> PagedKvCache:
    """Give the model our attention and packed linears, and make room for its KV.

    probe: one row of input to try it on, a token unless given. Raises ValueError and the like for a model that
    does not call attention in the common way.
    """
    AttentionInterface.register(NAME, attention)
    text = model.config.get_text_config()
    model.config._attn_implementation = text._attn_implementation = NAME
    recorder = _Recorder()
    zeros = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(**(probe or {"input_ids": zeros}), position_ids=zeros, use_cache=False, plan=recorder)
    layers = len(recorder.hows)
    if recorder.like is None or len(recorder.shapes) != 1 or sorted(recorder.hows) != list(range(layers)):
        raise ValueError(f"{layers} layers with K/V shapes {sorted(recorder.shapes)}")
    if layers != text.num_hidden_layers:
        raise ValueError(f"only {layers} of {text.num_hidden_layers} layers keep K and V")
    pack(model, [recorder.hows[layer] for layer in range(layers)])
    ((kv_heads, key_dim, value_dim),) = recorder.shapes
    row_bytes = layers * kv_heads * (key_dim + value_dim) * recorder.like.element_size()
    rows = kv_rows if kv_rows is not None else min(_MOST_ROWS, int(_free_memory(model.device) * _SHARE / row_bytes))
    num_blocks = max(1, rows // BLOCK_SIZE)
    storage = KvStorage(
        num_blocks,
        BLOCK_SIZE,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        like=recorder.like,
    )
    return PagedKvCache(info, storage, num_blocks)


def _free_memory(device: torch.device) -> int:
    """Bytes"""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
