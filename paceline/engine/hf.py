"""Reference engine: any causal language model through transformers with its own KV cache.

Runs one sequence at a time. Chains are masked by the model itself; trees get an explicit mask and explicit positions.
A model whose cache cannot be rolled back or masked this way (recurrent layers, chunked attention) is recomputed from
its tokens on every forward: slow, but correct for any causal model. Knows nothing of blocks or batching.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, PlacedSegment, SeqId
from paceline.core.sampling.sampler import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.engine.model_config import MASKED_KINDS, cache_input, windows
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler
from paceline.engine.sequence_table import TableEngine
from paceline.engine.tensors import (
    agrees,
    engine_error,
    kv_from_tensors,
    kv_to_tensors,
    plain_scores,
    prompt_for,
    use_device,
)
from paceline.errors import EngineError

log = logging.getLogger("paceline.engine")

_SHORT_WINDOW = 8  # rows


class HFEngine(TableEngine):
    """The engine contract on `model`, which must be in evaluation mode and is owned by this engine.

    recompute None: test the cache on a short prompt with a tree, and recompute if the scores differ.
    The KV cache is unbounded: `free_rows` is None.
    """

    def __init__(self, model: PreTrainedModel, info: ModelInfo, *, recompute: bool | None = None) -> None:
        super().__init__(info)
        self._model = model
        self._windows = windows(model.config)
        self._cache_input = cache_input(model)
        self._can_select_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._caches: dict[SeqId, DynamicCache] = {}
        self._row_shapes: list[tuple[int, int, int]] | None = None  # of K and V: (layers, kv heads, dim)
        self._sampler = DeviceSampler()
        self._recompute = bool(recompute)
        if recompute is None and not self._cache_works():
            log.warning("%s: its cache cannot be rolled back; every forward recomputes the sequence", info.name)
            self._recompute = True

    def forward(self, batch: Batch) -> Output:
        use_device(self._model.device)
        placed = self._table.place(batch)
        before = {segment.seq: self._snapshot(segment.seq) for segment in batch.segments}
        try:
            with torch.inference_mode():
                logits = tuple(self._run(segment) for segment in placed)
        except RuntimeError as error:  # torch raises it when memory runs out
            self._caches |= before
            for seq in before.keys() - self._table.lengths().keys():
                del self._caches[seq]  # new sequences, whose first segment has failed
            raise engine_error(error, self._model.device) from error
        self._table.written(placed)
        return Output(logits, tuple(segment.scored for segment in placed))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        use_device(self._model.device)
        return self._sampler(requests)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        kept = self._table.prune(seq, keep, live, horizon)
        cache = self._caches.setdefault(seq, DynamicCache())  # without layers if rows are recomputed
        remaining = [*range(kept.first), *(kept.first + row for row in kept.order)]
        rows = torch.tensor(remaining, dtype=torch.long, device=self._model.device)
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys.index_select(2, rows), layer.values.index_select(2, rows)

    def truncate(self, seq: SeqId, length: int) -> None:
        old_length = self._table.length(seq)
        self._table.truncate(seq, length)
        if old_length > length and not self._recompute:
            self._caches[seq].crop(length - old_length)  # negative: the number of rows to drop

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        num_rows = len(tokens)
        self._table.export(seq, num_rows)
        keys, values = (torch.empty(shape, dtype=self._model.dtype, device="cpu") for shape in self._shapes(num_rows))
        for i, (key, value) in enumerate(_layers(self._caches[seq])):  # no layers if rows are recomputed
            keys[i], values[i] = (tensor[0, :, :num_rows].transpose(0, 1) for tensor in (key, value))
        return kv_from_tensors(self._info.fingerprint, tokens, keys, values)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        keys, values = kv_to_tensors(
            rows, self._info.fingerprint, *self._shapes(len(rows.tokens)), dtype=self._model.dtype
        )
        self._table.adopt(seq, rows.tokens)
        cache = DynamicCache()
        for i, layer in enumerate(zip(keys, values, strict=True)):
            key, value = (tensor.transpose(0, 1)[None].to(self._model.device, copy=True) for tensor in layer)
            cache.update(key, value, i)
        self._caches[seq] = cache

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:  # noqa: ARG002  # shares nothing
        if seq in self._table:
            raise EngineError(f"sequence {seq} exists already")
        return self._import_longer(seq, stored, 0, len(tokens))

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._caches.pop(seq, None)

    def check(self) -> None:
        lengths = self._table.lengths()
        assert self._caches.keys() == lengths.keys(), (self._caches.keys(), lengths)
        if not self._recompute:
            held = {seq: cache.get_seq_length() for seq, cache in self._caches.items()}
            assert held == lengths, (held, lengths)

    def _snapshot(self, seq: SeqId) -> DynamicCache:
        """Caches grow by concatenation, so the rows themselves are shared."""
        cache = copy.copy(self._caches.get(seq) or DynamicCache())
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        return cache

    def _shapes(self, num_rows: int) -> list[tuple[int, int, int, int]]:
        """Shapes of K and V in a `KvPrefix` of `num_rows` rows. Found once by a forward of one token."""
        if self._row_shapes is None:
            cache = DynamicCache()
            if not self._recompute:  # else only tokens are stored
                token = torch.zeros((1, 1), dtype=torch.long, device=self._model.device)
                with torch.inference_mode():
                    self._model(input_ids=token, use_cache=True, **{self._cache_input: cache})
            self._row_shapes = _row_shapes(cache)
        return [(layers, num_rows, heads, dim) for layers, heads, dim in self._row_shapes]

    def _run(self, segment: PlacedSegment) -> DeviceLogits:
        # A cache without windows: old rows stay, and masks hide them.
        cache = self._caches.setdefault(segment.seq, DynamicCache())
        if not segment.tokens:
            logits = torch.empty(0, self._info.vocab_size, device=self._model.device)
        elif self._recompute:
            logits = self._recomputed(segment)
        else:
            logits = self._cached(cache, segment)
        return DeviceLogits(logits, 0, len(logits))

    def _cached(self, cache: DynamicCache, segment: PlacedSegment) -> torch.Tensor:
        """(wanted, vocab)"""
        device = self._model.device
        masks: torch.Tensor | dict[str, torch.Tensor] | None = None
        if segment.parents is not None:
            by_kind = {kind: self._mask(segment, window) for kind, window in self._windows.items()}
            masks = by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))
        return self._logits(
            segment.wanted,
            input_ids=torch.tensor([segment.tokens], device=device),
            position_ids=torch.tensor([segment.positions()], device=device),
            attention_mask=masks,
            use_cache=True,
            **{self._cache_input: cache},
        )

    def _logits(self, rows: Sequence[int], **inputs: object) -> torch.Tensor:
        """(rows, vocab): logits of these rows of one forward; where the model supports it, only these are computed."""
        index = torch.tensor(rows, dtype=torch.long, device=self._model.device)
        if self._can_select_rows:
            selected: torch.Tensor = self._model(**inputs, logits_to_keep=index).logits[0]
            return selected
        logits: torch.Tensor = self._model(**inputs).logits[0]
        return logits[index]

    def _mask(self, segment: PlacedSegment, window: int | None) -> torch.Tensor:
        """(1, 1, n, start + n), added to the attention scores."""
        visible = torch.from_numpy(segment.attention_mask(window)).to(self._model.device)
        lowest = torch.finfo(self._model.dtype).min
        return torch.zeros(visible.shape, dtype=self._model.dtype, device=visible.device).masked_fill_(
            ~visible, lowest
        )[None, None]

    def _recomputed(self, segment: PlacedSegment) -> torch.Tensor:
        """(wanted, vocab): one forward for a chain, one for each scored row of a tree."""
        device, tokens = self._model.device, self._table.tokens(segment.seq)
        before = len(tokens)
        if segment.parents is None:
            ids = torch.tensor([[*tokens, *segment.tokens]], device=device)
            return self._logits([before + row for row in segment.wanted], input_ids=ids, use_cache=False)
        rows: list[torch.Tensor] = []
        for row in segment.wanted:
            path = self._table.path(segment, row)
            ids = torch.tensor([[*tokens, *path]], device=device)
            rows.append(self._logits([before + len(path) - 1], input_ids=ids, use_cache=False))
        return torch.cat(rows) if rows else torch.empty(0, self._info.vocab_size, device=self._model.device)

    def _cache_works(self) -> bool:
        """Tried with a short window, as a short prompt shows: some models have one in their settings and use none."""
        config, own = self._model.config.get_text_config(), self._windows
        window = getattr(config, "sliding_window", None)
        if isinstance(window, int):
            config.sliding_window = min(window, _SHORT_WINDOW)
        try:
            self._windows = windows(self._model.config)
            prompt = prompt_for(self._windows, self._info)
            plain = plain_scores(self._model, prompt, self._info.name)
            return not own.keys() - MASKED_KINDS and agrees(self, prompt, plain, self._model.dtype)
        finally:
            self._windows = own
            if isinstance(window, int):
                config.sliding_window = window


def _layers(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer: (1, kv heads, rows, dim)"""
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        layers.append((layer.keys, layer.values))
    return layers


def _row_shapes(cache: DynamicCache) -> list[tuple[int, int, int]]:
    """(layers, kv heads, dim) of K and of V. Raises EngineError where layers differ."""
    layers = _layers(cache)
    if not layers:
        return [(0, 0, 0), (0, 0, 0)]
    shapes = {tuple((tensor.shape[1], tensor.shape[3]) for tensor in layer) for layer in layers}
    if len(shapes) != 1:
        raise EngineError("the layers of this model differ in the shapes of their K and V")
    return [(len(layers), heads, dim) for heads, dim in shapes.pop()]
