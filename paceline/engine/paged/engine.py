"""Fast engine: transformers' modules with paged attention; one forward is one flat row of tokens of many sequences.

KV blocks are reference-counted: forks share their prefix, and a block is copied on the first write. Rows outside a
sliding window stay stored until their sequence ends. `paged_engine` refuses, with a reason, models whose layers differ
in their K/V shapes and models that need masks other than sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import psutil
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from paceline.core.batching.segment import Batch
from paceline.core.sampling.row import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.engine.faults import engine_error
from paceline.engine.model_config import MASKED_KINDS, max_positions, windows
from paceline.engine.paged.attention import NAME, AttentionMetadata, LayerAttention, attention
from paceline.engine.paged.kv_cache import PagedKvCache
from paceline.engine.paged.kv_storage import KvStorage
from paceline.engine.paged.packed_linear import pack
from paceline.engine.paged.weights_memory import release_mapped_weights
from paceline.engine.sampling.device_logits import DeviceLogits, DeviceSampler
from paceline.engine.self_test import agrees, prompt_for
from paceline.engine.tensors import dists
from paceline.errors import EngineError

BLOCK_SIZE = 16  # rows
_KV_SHARE = 0.9  # of an accelerator's memory that the weights leave: the rest is for activations
_CPU_KV_SHARE = 0.25  # of the free memory, which other programs need as well
_MAX_CPU_ROWS = 1 << 17  # more than a CPU computes in an hour
_UNUSED_CPU_CONTEXTS = 4  # kept for later prompts: 48 MiB of the demo pair's smaller model
_MIB = 1 << 20


class _AttentionProbe:
    """Attention metadata of a trial forward: records each layer's parameters and K/V shapes, and returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}
        self.shapes: set[tuple[int, int, int]] = set()  # (kv heads, key dim, value dim)
        self.like: Tensor | None = None  # a key, for device and dtype

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        self.layers[layer] = params
        self.shapes.add((key.shape[1], key.shape[2], value.shape[2]))
        self.like = key
        return query.new_zeros(*query.shape[:2], value.shape[2])


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch as one flat row of tokens."""

    tokens: Tensor  # (1, rows)
    positions: Tensor  # (1, rows)
    logits_rows: Tensor  # (wanted,) rows to score

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        logits_rows: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for segment in batch.segments:
            logits_rows += [len(tokens) + row for row in segment.logits_rows()]
            tokens += segment.tokens
            positions += segment.positions()
        as_tensor = partial(torch.tensor, dtype=torch.long, device=device)
        return cls(as_tensor([tokens]), as_tensor([positions]), as_tensor(logits_rows))


def output_of(batch: Batch, logits: Tensor) -> Output:
    """Logits by segment. logits: (wanted, vocab), in the order of the batch's segments and their rows"""
    if len(logits) != sum(len(segment.logits_rows()) for segment in batch.segments):
        raise EngineError(f"the model scored {len(logits)} rows, not those that were asked for")
    parts: list[DeviceLogits] = []
    first = 0
    for segment in batch.segments:
        stop = first + len(segment.logits_rows())
        parts.append(DeviceLogits(logits, first, stop))
        first = stop
    return Output(tuple(parts))


class PagedEngine(PagedKvCache):
    """The engine contract on a model with paged attention. Made by `paged_engine`."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, storage: KvStorage) -> None:
        super().__init__(info, storage, kv_model=info.fingerprint)
        self._model = model
        self._sampler = DeviceSampler()

    def forward(self, batch: Batch) -> Output:
        return output_of(batch, self.scores(batch))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return self._sampler(requests)

    def scores(self, batch: Batch) -> Tensor:
        """(wanted, vocab): a forward that returns logits instead of distributions."""
        metadata = self._allocate(batch)
        try:
            with torch.inference_mode():
                logits = self._logits(batch, metadata)
        except RuntimeError as error:  # torch raises it when memory runs out
            self._roll_back(batch)
            raise engine_error(error, self._model.device) from error
        self._written(batch)
        return logits

    def _logits(self, batch: Batch, metadata: AttentionMetadata) -> Tensor:
        """(wanted, vocab)"""
        flat = FlatBatch.of(batch, self._model.device)
        output = self._model(
            input_ids=flat.tokens,
            position_ids=flat.positions,
            logits_to_keep=flat.logits_rows,
            use_cache=False,
            attn_metadata=metadata,
        )
        logits: Tensor = output.logits[0]
        return logits


def paged_engine(
    model: PreTrainedModel, info: ModelInfo, *, kv_rows: int | None = None, kv_mib: int | None = None
) -> PagedEngine | str:
    """An engine that takes over `model`, or the reason why its architecture is not supported.

    kv_rows, kv_mib: see `loader.load_model`.

    Verified on a short prompt against the model's plain forward. The model is changed in either case.
    """
    kinds = windows(model.config)
    if unknown := kinds.keys() - MASKED_KINDS:
        return f"it has layers of the kind {', '.join(sorted(unknown))}"
    prompt = prompt_for(kinds, info)
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=model.device)
        plain = dists(model(input_ids=ids, use_cache=False).logits[0])
    try:
        storage = patch_model(model, kv_rows=kv_rows, kv_mib=kv_mib)
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        return f"its attention is not of the common kind ({error})"
    engine = PagedEngine(model, replace(info, backend="paged"), storage)
    if not agrees(engine, prompt, plain, model.dtype):
        return "its scores differ from those of its plain forward"
    return engine


def patch_model(
    model: PreTrainedModel,
    *,
    kv_rows: int | None = None,
    kv_mib: int | None = None,
    probe: dict[str, Tensor] | None = None,
) -> KvStorage:
    """Replace the model's attention and linears in place, and allocate the storage of its KV cache.

    probe: one row of input for a trial forward, a token unless given. Raises ValueError, TypeError,
    NotImplementedError, AttributeError or RuntimeError for a model that does not call attention in the common way.
    """
    AttentionInterface.register(NAME, attention)
    text = model.config.get_text_config()
    model.config._attn_implementation = text._attn_implementation = NAME
    tried = _AttentionProbe()
    zeros = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(**(probe or {"input_ids": zeros}), position_ids=zeros, use_cache=False, attn_metadata=tried)
    layers = len(tried.layers)
    if tried.like is None or len(tried.shapes) != 1 or sorted(tried.layers) != list(range(layers)):
        raise ValueError(f"{layers} layers with K/V shapes {sorted(tried.shapes)}")
    if layers != text.num_hidden_layers:
        raise ValueError(f"only {layers} of {text.num_hidden_layers} layers keep K and V")
    pack(model, [tried.layers[layer] for layer in range(layers)])
    release_mapped_weights(model)
    ((kv_heads, key_dim, value_dim),) = tried.shapes
    row_bytes = layers * kv_heads * (key_dim + value_dim) * tried.like.element_size()
    max_unused = None
    if kv_mib is not None and kv_rows is None:
        kv_rows = kv_mib * _MIB // row_bytes
    elif kv_rows is None:
        kv_rows = _default_kv_rows(model.device, row_bytes)
        if model.device.type == "cpu":  # memory that is taken as rows are written, and that nobody asked us to fill
            max_unused = _UNUSED_CPU_CONTEXTS * max_positions(model.config) // BLOCK_SIZE
    return KvStorage(
        max(1, kv_rows // BLOCK_SIZE),
        BLOCK_SIZE,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        like=tried.like,
        max_unused=max_unused,
    )


def _default_kv_rows(device: torch.device, row_bytes: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _KV_SHARE / row_bytes)
    return min(_MAX_CPU_ROWS, int(psutil.virtual_memory().available * _CPU_KV_SHARE / row_bytes))
