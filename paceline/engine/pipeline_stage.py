"""A span of a model's layers as an engine of its own: hidden rows in, hidden rows out.

The first stage embeds tokens, the last norms and scores; each reads only its own tensors from the safetensors files.
A stage is a smaller model of the same architecture whose layers are numbered from 0, so attention, KV, packing and
bookkeeping are those of `paged`. Models whose layers behave by their absolute number are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig, PreTrainedModel

from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, SeqId
from paceline.engine.base import ModelInfo, Output
from paceline.engine.loader import DEFAULTS, EngineOptions, choose_device, choose_dtype, find, fingerprint, quiet
from paceline.engine.model_config import max_positions
from paceline.engine.paged.engine import FlatBatch, PagedKvCache, output_of, patch_model
from paceline.errors import ConfigError, EngineError

HiddenArray = NDArray[np.float32]

_LAYER = re.compile(r"(?P<before>(?:\w+\.)*?(?:layers|h|blocks))\.(?P<index>\d+)\.(?P<rest>.+)")
_HEAD = re.compile(r"(lm_head|embed_out)\.")
_EMBEDDING = re.compile(r"\b(embed_tokens|wte|embed_in|word_embeddings)\.")
_POSITIONS = ("wpe", "embed_positions")
_FINAL = ("norm", "ln_f", "final_layer_norm", "project_out")


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Hidden rows for the next stage, or from the last stage the distributions of the wanted rows."""

    hidden: HiddenArray | None  # (rows of the batch, d_model)
    output: Output | None


class Stage:
    """Layers `first` to `stop` - 1 of a model. The engine contract but for `forward`, which also takes hidden rows."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, rows: PagedKvCache, *, first: bool, last: bool) -> None:
        self._model, self._info, self._rows = model, info, rows
        self._first, self._last = first, last

    @property
    def info(self) -> ModelInfo:
        """That of the whole model."""
        return self._info

    def forward(self, batch: Batch, hidden: HiddenArray | None = None) -> StageOutput:
        """hidden: (rows of the batch, d_model) from the stage before; None at the first. Raises EngineError."""
        if (hidden is None) != self._first or (hidden is not None and len(hidden) != batch.num_rows):
            raise EngineError("the first stage takes tokens alone, each other one a hidden row for every token")
        plan = self._rows.allocate(batch)
        try:
            with torch.inference_mode():
                found = self._run(FlatBatch.of(batch, self._model.device), hidden, plan)
        except RuntimeError as error:  # what torch raises when memory runs out, or for rows of another width
            self._rows.roll_back(batch)
            raise EngineError(f"the stage could not run: {error}") from error
        self._rows.written(batch)
        if self._last:
            return StageOutput(None, output_of(batch, found))
        return StageOutput(found.float().cpu().numpy(), None)

    def _run(self, flat: FlatBatch, hidden: HiddenArray | None, plan: object) -> Tensor:
        """(wanted, vocab) at the last stage, else (rows, d_model)"""
        wanted = {"logits_to_keep": flat.wanted} if self._last else {}
        if hidden is None:
            rows = {"input_ids": flat.tokens}
        else:
            rows = {"inputs_embeds": torch.from_numpy(hidden).to(self._model.device, self._model.dtype)[None]}
        output = self._model(**rows, **wanted, position_ids=flat.positions, use_cache=False, plan=plan)
        found: Tensor = output.logits[0] if self._last else output.last_hidden_state[0]
        return found

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        self._rows.commit(seq, keep, rest)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._rows.truncate(seq, length)

    def fork(self, seq: SeqId, into: SeqId) -> None:
        self._rows.fork(seq, into)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        """Of this stage's layers."""
        return self._rows.export_kv(seq, tokens)

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        self._rows.import_kv(seq, rows)

    def release(self, seq: SeqId) -> None:
        self._rows.release(seq)

    def length(self, seq: SeqId) -> int:
        return self._rows.length(seq)

    @property
    def block_size(self) -> int:
        return self._rows.block_size

    def free_rows(self) -> int:
        return self._rows.free_rows()

    def check(self) -> None:
        self._rows.check()


class _Nothing(nn.Module):
    """Stands where a stage has no embedding of positions: they were added by the first one."""

    def forward(self, *_: object, **__: object) -> Tensor:
        return torch.zeros(())


def load_stage(
    path_or_name: str | Path,
    first: int,
    stop: int,
    options: EngineOptions = DEFAULTS,
    *,
    name: str | None = None,
) -> Stage:
    """Layers first..stop-1, with the embedding if first is 0 and the scores if stop is the number of layers."""
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
        config.vocab_size, config.pad_token_id = 1, None  # no tokens here, so no table of them
    device = torch.device(choose_device(options.device))
    dtype = choose_dtype(options.dtype, device, config.dtype, directory)
    table = MODEL_FOR_CAUSAL_LM_MAPPING if is_last else MODEL_MAPPING
    architecture = cast("type[PreTrainedModel]", table[type(config)])
    with quiet():
        loaded = architecture.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := [key for key in report["missing_keys"] if is_first or not _EMBEDDING.search(key)]:
        raise ConfigError(f"{directory} lacks {len(missing)} tensors of these layers, among them {missing[0]}")
    model.requires_grad_(False)
    _cut(model, first=is_first, last=is_last)
    nn.Module.to(model, device)
    whole = ModelInfo(
        name=name or directory.name,
        fingerprint=fingerprint(directory),
        vocab_size=vocab_size,
        max_positions=max_positions(config),
        dtype=str(dtype).removeprefix("torch."),
        backend="paged",
    )
    span = replace(whole, fingerprint=f"{whole.fingerprint} layers {first} to {stop - 1}")  # of the rows it keeps
    probe = None if is_first else {"inputs_embeds": torch.zeros(1, 1, config.hidden_size, dtype=dtype, device=device)}
    try:
        rows = patch_model(model, span, kv_rows=options.kv_rows, probe=probe)
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{directory} cannot be cut into stages: {error}") from error
    return Stage(model, whole, rows, first=is_first, last=is_last)


def _tensors(directory: Path, first: int, stop: int, *, embedding: bool, head: bool) -> dict[str, Tensor]:
    """The stage's own tensors, its layers numbered from 0. Raises ConfigError for names it cannot place."""
    where: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            where |= dict.fromkeys(stored.keys(), file)
    tied = head and not any(_HEAD.match(name) for name in where)  # then the scores are read from the embedding
    wanted: dict[str, str] = {}  # stored name → name in the stage
    for name in where:
        if layer := _LAYER.fullmatch(name):
            index = int(layer["index"])
            if first <= index < stop:
                wanted[name] = f"{layer['before']}.{index - first}.{layer['rest']}"
        elif _EMBEDDING.search(name):
            wanted |= {name: name} if embedding or tied else {}
        elif _HEAD.match(name):
            wanted |= {name: name} if head else {}
        else:  # norms and positions: small
            wanted[name] = name
    if len({name for name in wanted if _LAYER.fullmatch(name)}) < stop - first:
        raise ConfigError(f"{directory}: the names of its tensors do not say which layer they belong to")
    found: dict[str, Tensor] = {}
    for file in set(where[name] for name in wanted):
        with safe_open(file, framework="pt") as stored:
            found |= {new: stored.get_tensor(name) for name, new in wanted.items() if where[name] == file}
    return found


def _cut(model: PreTrainedModel, *, first: bool, last: bool) -> None:
    """Take out what the stages before and after do."""
    (backbone,) = (
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and name in ("layers", "h") for name, child in module.named_children())
    )
    present = dict(backbone.named_children())
    if not last:
        for name in present.keys() & set(_FINAL):
            setattr(backbone, name, nn.Identity())
    if not first:
        for name in present.keys() & set(_POSITIONS):
            setattr(backbone, name, _Nothing())
        if "project_in" in present:
            backbone.project_in = nn.Identity()
        if not last or not model.config.tie_word_embeddings:
            model.set_input_embeddings(nn.Embedding(1, 1))  # the table is another stage's
