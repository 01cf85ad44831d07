"""Pipeline stage: a span of a model's layers, from hidden rows to hidden rows.

The first stage embeds tokens, the last applies the final norm and scores; each reads only its own tensors from the
safetensors files. A stage is a smaller model of the same architecture with its layers numbered from 0, so attention,
KV cache and packing are those of `paged`. Models whose layers depend on their absolute index are refused.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel

from paceline.core.batching.segment import Batch, Segment, SeqId, kept_rows, without_dropped
from paceline.engine.base import ModelInfo, Output
from paceline.engine.loader import DEFAULTS, EngineOptions, choose_device, find, fingerprint, quiet
from paceline.engine.model_config import max_positions
from paceline.engine.paged.attention.backends import AttentionBackend, DeviceStep, make_attention
from paceline.engine.paged.engine import output_of, patch_model
from paceline.engine.paged.kv_cache import KvStorage, PagedKvCache
from paceline.engine.tensors import use_device
from paceline.engine.weights import choose_format, format_of, read_as_stored, tensors_of
from paceline.errors import ConfigError, EngineError
from paceline.hub.gguf import kept_as
from paceline.system import usable_memory
from paceline.wire.stages.messages import RowFormat, StageCost

LAYER = re.compile(r"(?P<before>(?:\w+\.)*?(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)")
HEAD = re.compile(r"(lm_head|embed_out)\.")
EMBEDDING = re.compile(r"\b(embed_tokens|wte|embed_in|word_embeddings)\.")
_POSITIONS = ("wpe", "embed_positions")
_FINAL = ("norm", "ln_f", "final_layer_norm", "project_out")


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Hidden rows for the next stage; from the last stage the logits of the requested rows."""

    batch: Batch  # for the next stage: what was given, without the rows that a prune had dropped before they came
    hidden: Tensor | None  # (rows of `batch`, d_model)
    output: Output | None  # of the segments given


def rows_to_bytes(hidden: Tensor, format: RowFormat) -> bytes:
    """hidden: (rows, d_model). In float16, what is larger than its greatest number becomes that number."""
    dtype: torch.dtype = getattr(torch, format)
    if dtype == torch.float16:
        hidden = hidden.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return hidden.to(dtype).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def rows_from_bytes(data: bytes | bytearray, format: RowFormat, rows: int, width: int) -> Tensor:
    """(rows, width), over the bytes themselves. Raises EngineError if these are not as many as the shape takes."""
    dtype: torch.dtype = getattr(torch, format)
    if len(data) != rows * width * dtype.itemsize:
        raise EngineError(f"{len(data)} bytes for {rows} rows of {width} numbers in {format}")
    return torch.frombuffer(data, dtype=dtype).view(rows, width) if data else torch.empty(rows, width, dtype=dtype)


class Stage(PagedKvCache):
    """Layers `first` to `stop` - 1 of a model. The engine contract, except that `forward` also takes hidden rows.

    `info` describes the whole model; exported KV holds the stage's own layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        storage: KvStorage,
        attention: AttentionBackend,
        *,
        first: int,
        stop: int,
        num_layers: int,
    ) -> None:
        """num_layers: of the whole model."""
        super().__init__(info, storage, kv_model=f"{info.fingerprint} layers {first} to {stop - 1}")
        self.first, self.stop = first, stop
        self.whole_layers = num_layers
        self._model, self._attention = model, attention
        self._is_first, self._is_last = first == 0, stop == num_layers

    @property
    def width(self) -> int:
        """Numbers of a hidden row."""
        return int(self._model.config.hidden_size)

    def forward(self, batch: Batch, hidden: Tensor | None = None) -> StageOutput:
        """hidden: (rows of the batch, d_model) from the previous stage; None at the first. Raises EngineError."""
        if (hidden is None) != self._is_first or (hidden is not None and hidden.shape != (batch.num_rows, self.width)):
            raise EngineError(
                "the first stage takes tokens alone, each other one a hidden row of its width for every token"
            )
        use_device(self._model.device)
        placed = self._table.place(batch, first_stage=self._is_first)
        left = without_dropped(batch, placed)
        if hidden is not None and left.num_rows < len(hidden):
            hidden = hidden[kept_rows(batch, placed)]
        width = self._info.vocab_size if self._is_last else 0  # of no rows
        result = self._computed(placed, width, lambda flat: self._run(self._attention.prepare(flat), hidden))
        if self._is_last:
            return StageOutput(left, None, output_of(placed, result))
        return StageOutput(left, result, None)

    def _run(self, step: DeviceStep, hidden: Tensor | None) -> Tensor:
        """(wanted, vocab) at the last stage, else (rows, d_model)"""
        options: dict[str, object] = {"logits_to_keep": step.logits_rows} if self._is_last else {}
        if hidden is None:
            inputs = {"input_ids": step.tokens}
        else:
            inputs = {"inputs_embeds": hidden.to(self._model.device, self._model.dtype)[None]}
        options |= {"position_ids": step.positions, "attn_metadata": step.attending}
        output = self._model(**inputs, **options, use_cache=False)
        result: Tensor = output.logits[0] if self._is_last else output.last_hidden_state[0]
        return result


class _NoPositions(nn.Module):
    """Replaces the position embedding of a later stage by zero: the first stage has added the positions."""

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.zeros(())


def load_stage(
    path_or_name: str | Path,
    first: int,
    stop: int,
    options: EngineOptions = DEFAULTS,
) -> Stage:
    """Load layers first..stop-1, with the embedding if first is 0 and the head if stop is the number of layers."""
    directory = find(path_or_name)
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    layers, vocab_size = int(config.num_hidden_layers), int(config.vocab_size)
    if not 0 <= first < stop <= layers:
        raise ConfigError(f"{directory} has layers 0 to {layers - 1}; {first} to {stop - 1} is not a span of them")
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ConfigError(f"{directory} scales attention by the number of the layer, so it cannot be cut into stages")
    is_first, is_last = first == 0, stop == layers
    tensors = _tensors(directory, first, stop, embedding=is_first, head=is_last)
    config.num_hidden_layers = stop - first
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[first:stop]
    if not is_first and not is_last:
        config.vocab_size, config.pad_token_id = 1, None  # no tokens, so no embedding table
    device = torch.device(choose_device(options.device))
    use_device(device)
    chosen = choose_format(options.dtype, device, config, directory)
    dtype = chosen.computed
    if chosen.is_stored:
        read_as_stored(config, tensors)
    table = MODEL_FOR_CAUSAL_LM_MAPPING if is_last else MODEL_MAPPING
    architecture = cast("type[PreTrainedModel]", table[type(config)])
    with quiet():
        loaded = architecture.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := [key for key in report["missing_keys"] if is_first or not EMBEDDING.search(key)]:
        raise ConfigError(f"{directory} lacks {len(missing)} tensors of these layers, among them {missing[0]}")
    model.requires_grad_(False)
    _remove_other_stages(model, is_first=is_first, is_last=is_last)
    chosen.adopt(model)
    nn.Module.to(model, device)
    info = ModelInfo(
        name=directory.name,
        fingerprint=fingerprint(directory),
        vocab_size=vocab_size,
        max_positions=max_positions(config),
        dtype=str(dtype).removeprefix("torch."),
        backend="paged",
        kept_as=kept_as(directory),
    )
    probe = None if is_first else {"inputs_embeds": torch.zeros(1, 1, config.hidden_size, dtype=dtype, device=device)}
    try:
        storage, asked = patch_model(model, kv_rows=options.kv_rows, kv_mib=options.kv_mib, probe=probe)
        attention = make_attention(options.attention, storage, asked)
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{directory} cannot be cut into stages: {error}") from error
    return Stage(model, info, storage, attention, first=first, stop=stop, num_layers=layers)


def _tensors(directory: Path, first: int, stop: int, *, embedding: bool, head: bool) -> dict[str, Tensor]:
    """Tensors of the stage, its layers numbered from 0. Raises ConfigError if the names carry no layer indices."""
    tensors = tensors_of(directory)
    is_tied = head and not any(map(HEAD.match, tensors))  # the head's weights are the embedding's
    wanted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if layer := LAYER.fullmatch(name):
            index = int(layer["index"])
            if first <= index < stop:
                wanted[f"{layer['before']}.{index - first}.{layer['rest']}"] = tensor
        elif EMBEDDING.search(name):
            wanted |= {name: tensor} if embedding or is_tied else {}
        elif HEAD.match(name):
            wanted |= {name: tensor} if head else {}
        else:  # norms and positions: small
            wanted[name] = tensor
    if len({name for name in wanted if LAYER.fullmatch(name)}) < stop - first:
        raise ConfigError(f"{directory}: the names of its tensors do not say which layer they belong to")
    return wanted


def _remove_other_stages(model: PreTrainedModel, *, is_first: bool, is_last: bool) -> None:
    """Replace the modules that belong to earlier and later stages by ones without effect."""
    (backbone,) = (
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and name in ("layers", "h") for name, child in module.named_children())
    )
    present = dict(backbone.named_children())
    if not is_last:
        for name in present.keys() & set(_FINAL):
            setattr(backbone, name, nn.Identity())
    if not is_first:
        for name in present.keys() & set(_POSITIONS):
            setattr(backbone, name, _NoPositions())
        if "project_in" in present:
            backbone.project_in = nn.Identity()
        if not is_last or not model.config.tie_word_embeddings:
            model.set_input_embeddings(nn.Embedding(1, 1))  # the table belongs to another stage


SAMPLES = 7  # forwards of one row; the median counts
KV_ROWS = 256  # of the stages that are measured
FREE_SHARE = 0.8  # of the free memory: the rest is for the KV cache and everything else


def num_layers(path_or_name: str | Path) -> int:
    config = AutoConfig.from_pretrained(find(path_or_name), local_files_only=True, trust_remote_code=False)
    return int(config.num_hidden_layers)


def measure(path_or_name: str | Path, options: EngineOptions = DEFAULTS) -> StageCost:
    """What layers cost on this machine, for the plan of spans. Takes seconds; raises ConfigError.

    Loads the first layer, then the last with the head, one after the other.
    """
    directory = find(path_or_name)
    layers = num_layers(directory)
    few = options._replace(kv_rows=KV_ROWS, kv_mib=None)
    layer_s = _row_s(load_stage(directory, 0, 1, few)) if layers > 1 else 0.0
    last_s = _row_s(load_stage(directory, layers - 1, layers, few))
    sizes = _sizes(directory, options, layers)
    return StageCost(layer_s or last_s, max(0.0, last_s - layer_s), *sizes, _free_bytes(options))


def _row_s(stage: Stage) -> float:
    seq, seconds = SeqId(0), list[float]()
    for row in range(SAMPLES + 1):
        batch = Batch((Segment(seq, row, (0,)),))
        hidden = None if stage.first == 0 else torch.zeros(1, stage.width)
        began = time.perf_counter()
        stage.forward(batch, hidden)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one prepares


def _sizes(directory: Path, options: EngineOptions, layers: int) -> tuple[int, int, int]:
    """Bytes of a layer, of the embedding and of the head, in the number format they are kept in."""
    chosen = format_of(options.dtype, torch.device(choose_device(options.device)), directory)
    sizes = {"layers": 0, "embedding": 0, "head": 0}
    for name, tensor in tensors_of(directory).items():
        size = tensor.numel() * (tensor.dtype if chosen.by_rows else chosen.computed).itemsize
        if LAYER.fullmatch(name):
            sizes["layers"] += size
        elif EMBEDDING.search(name):
            sizes["embedding"] += size
        elif HEAD.match(name):
            sizes["head"] += size
    return sizes["layers"] // layers, sizes["embedding"], sizes["head"] or sizes["embedding"]  # tied


def _free_bytes(options: EngineOptions) -> int:
    device = torch.device(choose_device(options.device))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else usable_memory()[0]
    return int(FREE_SHARE * free)
