"""Fast engine: transformers' modules with paged attention; one forward is one flat row of tokens of many sequences.

KV blocks are reference-counted: sequences that begin alike share them. Rows outside a sliding window stay stored until
their sequence ends. `paged_engine` refuses, with a reason, models whose layers differ in their K/V shapes and models
that need masks other than sliding windows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from paceline.core.batching.block_manager import as_floats, turned
from paceline.core.batching.segment import Batch, PlacedSegment, Segment, SeqId
from paceline.core.sampling.sampler import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.engine.model_config import MASKED_KINDS, max_positions, windows
from paceline.engine.paged.attention.backends import (
    Attention,
    AttentionBackend,
    Capture,
    DeviceStep,
    ModelAttention,
    StepGraphs,
    Tiled,
    capture_of,
    make_attention,
)
from paceline.engine.paged.attention.tile_plan import NAME, LayerAttention
from paceline.engine.paged.attention.tile_plan import attention as attend
from paceline.engine.paged.kv_cache import FlatBatch, KvStorage, PagedKvCache
from paceline.engine.paged.packed_linear import pack, release_mapped_weights
from paceline.engine.sampling.sampler import DeviceLogits, DeviceSampler
from paceline.engine.tensors import agrees, plain_scores, prompt_for, use_device
from paceline.errors import EngineError
from paceline.system import usable_memory

log = logging.getLogger("paceline.engine")

BLOCK_SIZE = 16  # rows
_KV_SHARE = 0.9  # of an accelerator's memory that the weights leave: the rest is for activations
_CPU_KV_SHARE = 0.25  # of the free memory, which other programs need as well
_MAX_CPU_ROWS = 1 << 17  # more than a CPU computes in an hour
_UNUSED_CPU_CONTEXTS = 4  # kept for later prompts: 48 MiB of the demo pair's smaller model
_MIB = 1 << 20
_TURNED, _ROUNDING = 9, 0.02  # positions that a key is turned over for a test, and how far off it may be


class _AttentionProbe:
    """Attention metadata of a trial forward: records each layer's parameters and K/V shapes, and returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}
        self.shapes: set[tuple[int, int, int]] = set()  # (kv heads, key dim, value dim)
        self.query_heads: set[int] = set()
        self.like: Tensor | None = None  # a key, for device and dtype
        self.rotary: tuple[Tensor, Tensor] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: LayerAttention) -> Tensor:
        self.layers[layer] = params
        self.shapes.add((key.shape[1], key.shape[2], value.shape[2]))
        self.query_heads.add(query.shape[1])
        self.like = key
        return query.new_zeros(*query.shape[:2], value.shape[2])


def output_of(placed: Sequence[PlacedSegment], logits: Tensor) -> Output:
    """Logits by segment. logits: (wanted, vocab), in the order of the segments and their rows"""
    if len(logits) != sum(len(segment.wanted) for segment in placed):
        raise EngineError(f"the model scored {len(logits)} rows, not those that were asked for")
    parts: list[DeviceLogits] = []
    first = 0
    for segment in placed:
        stop = first + len(segment.wanted)
        parts.append(DeviceLogits(logits, first, stop))
        first = stop
    return Output(tuple(parts), tuple(segment.scored for segment in placed))


class PagedEngine(PagedKvCache):
    """The engine contract on a model with paged attention. Made by `paged_engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        storage: KvStorage,
        attention: AttentionBackend,
        capture: Capture | None = None,
    ) -> None:
        """capture: of forwards of few rows, if `attention` is tiled; None: none is replayed."""
        super().__init__(info, storage, kv_model=info.fingerprint)
        self._model, self._attention = model, attention
        self.attention = attention.name
        self._device = storage.keys.device
        self.graphs: StepGraphs | None = None
        if capture is not None and isinstance(attention, Tiled):
            self.graphs = StepGraphs(attention, self._logits, capture)
        self._sampler = DeviceSampler()
        self.frequencies: tuple[float, ...] = ()  # see `Rotates`

    def forward(self, batch: Batch) -> Output:
        use_device(self._device)
        placed = self._table.place(batch)
        return output_of(placed, self._computed(placed, self._info.vocab_size, self._scored))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        use_device(self._device)
        return self._sampler(requests)

    def _scored(self, flat: FlatBatch) -> Tensor:
        """(wanted, vocab)"""
        return self._logits(self._attention.prepare(flat)) if self.graphs is None else self.graphs.run(flat)

    def _logits(self, step: DeviceStep) -> Tensor:
        """(wanted, vocab)"""
        output = self._model(
            input_ids=step.tokens,
            position_ids=step.positions,
            logits_to_keep=step.logits_rows,
            use_cache=False,
            attn_metadata=step.attending,
        )
        logits: Tensor = output.logits[0]
        return logits


def paged_engine(
    model: PreTrainedModel,
    info: ModelInfo,
    *,
    kv_rows: int | None = None,
    kv_mib: int | None = None,
    attention: Attention | None = None,
    graphs: bool | None = None,
) -> PagedEngine | str:
    """An engine that takes over `model`, or the reason why its architecture is not supported.

    kv_rows, kv_mib: see `loader.load_model`. attention, graphs: None leaves the choice to the device.

    Verified on a short prompt against the model's plain forward. What was not asked for and fails this test is left
    out, first graphs, then Triton's kernels. The model is changed in either case.
    """
    kinds = windows(model.config)
    if unknown := kinds.keys() - MASKED_KINDS:
        return f"it has layers of the kind {', '.join(sorted(unknown))}"
    prompt = prompt_for(kinds, info)
    plain = plain_scores(model, prompt, info.name)
    try:
        storage, asked = patch_model(model, kv_rows=kv_rows, kv_mib=kv_mib)
        backend = make_attention(attention, storage, asked)
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        return f"its attention is not of the common kind ({error})"
    first = capture_of(storage.keys.device, graphs) if isinstance(backend, Tiled) else None
    ways: list[tuple[AttentionBackend, Capture | None]] = [(backend, first)]
    if graphs is None and first is not None:
        ways.append((backend, None))
    if attention is None and backend.name != "gathered":
        ways.append((make_attention("gathered", storage, asked), None))
    for backend, capture in ways:
        engine = PagedEngine(model, replace(info, backend="paged"), storage, backend, capture)
        if agrees(engine, prompt, plain, model.dtype):
            engine.frequencies = _frequencies(engine, model, prompt[0])
            return engine
        if len(ways) > 1:
            way = f"{backend.name} attention{'' if capture is None else ' with replayed steps'}"
            log.warning("%s: %s does not score as the model's plain forward does", info.name, way)
            storage.clear()  # of numbers that may not be finite
    return "its scores differ from those of its plain forward"


def _frequencies(engine: PagedEngine, model: PreTrainedModel, token: int) -> tuple[float, ...]:
    """Of the rotary embedding, if one turns the keys of all layers, and as `turned` does: tried on the first layer,
    whose keys depend on a token and its position alone."""
    found = [getattr(each, "inv_freq", None) for name, each in model.named_modules() if name.endswith("rotary_emb")]
    if len(found) != 1 or found[0] is None:
        return ()
    frequencies = tuple(map(float, found[0].tolist()))
    seq, tokens = SeqId(-1), (token,) * _TURNED
    replayed, engine.graphs = engine.graphs, None  # a trial is no step to keep
    engine.forward(Batch((Segment(seq, 0, tokens, logits="none"),)))
    engine.graphs = replayed
    rows = engine.export_kv(seq, tokens)
    engine.release(seq)
    first, last = rows.keys[:1, :1], as_floats(rows.keys[:1, -1:], rows.dtype)
    off = np.abs(as_floats(turned(first, rows.dtype, _TURNED - 1, frequencies), rows.dtype) - last).max()
    return frequencies if off <= _ROUNDING * np.abs(last).max() else ()


def patch_model(
    model: PreTrainedModel,
    *,
    kv_rows: int | None = None,
    kv_mib: int | None = None,
    probe: dict[str, Tensor] | None = None,
) -> tuple[KvStorage, ModelAttention]:
    """Replace the model's attention and linears in place, and allocate the storage of its KV cache.

    probe: one row of input for a trial forward, a token unless given. Raises ValueError, TypeError,
    NotImplementedError, AttributeError or RuntimeError for a model that does not call attention in the common way.
    """
    AttentionInterface.register(NAME, attend)
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
    params = [tried.layers[layer] for layer in range(layers)]
    pack(model, params)
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
    storage = KvStorage(
        max(1, kv_rows // BLOCK_SIZE),
        BLOCK_SIZE,
        layers=layers,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        like=tried.like,
        max_unused=max_unused,
    )
    return storage, ModelAttention(params, tried.query_heads.pop() if len(tried.query_heads) == 1 else None)


def _default_kv_rows(device: torch.device, row_bytes: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _KV_SHARE / row_bytes)
    return min(_MAX_CPU_ROWS, int(usable_memory()[0] * _CPU_KV_SHARE / row_bytes))
