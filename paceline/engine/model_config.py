"""Settings of a model from its files: attention kinds and windows, the context length, recommended sampling."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.offloading import ModelShape
from paceline.core.sampling.sampler import SamplingDefaults

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MASKED_KINDS = frozenset({"full_attention", "sliding_attention"})  # kinds with masks that the engines can build


def windows(config: PretrainedConfig) -> dict[str, int | None]:
    """Attention kind → its sliding window in rows; None: all earlier rows are visible. At least one entry."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # GPT-Neo's, of its own
    if kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(kinds)}
    if window is not None and getattr(config, "use_sliding_window", True):
        return {"sliding_attention": window}
    return {"full_attention": None}


def cache_input(model: PreTrainedModel) -> str:
    """Name under which `forward` takes a KV cache: transformers 5.24 renamed it, model by model."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def max_positions(config: PretrainedConfig) -> int:
    """Maximum rows of one sequence.

    Dynamic and longrope rotary embeddings change their frequencies beyond the original context, which would invalidate
    cached rows; for such models the limit is the original context.
    """
    config = config.get_text_config()
    longest = max(0, int(getattr(config, "max_position_embeddings", None) or 0)) or 2048
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(each for each in given.values() if isinstance(each, dict))):  # or one of each kind of layer
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def shape_of(config: PretrainedConfig, modules: Collection[str]) -> ModelShape | None:
    """Sizes of the model, by which its operations are counted; None for mixtures of experts and unknown configurations.

    modules: names of its modules, without their paths: `gate_proj` or `gate_up_proj` tell a gated network.
    """
    config = config.get_text_config()
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = [size for name in names if isinstance(size := getattr(config, name, None), int)]
    if len(sizes) < len(names) or any("expert" in name for name in modules):
        return None
    layers, hidden, inner, heads, vocab = sizes
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    gated = any(name in ("gate_proj", "gate_up_proj") for name in modules)
    return ModelShape(layers, hidden, inner, kv_heads / heads, 3 if gated else 2, vocab)


# Recommended sampling settings of a model: `generation_config.json`, as transformers writes it.


FILE = "generation_config.json"
_RANGES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 <= value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0.01 <= value <= 10,
    "top_k": lambda value: 0 <= value < 2**31 and value == int(value),
}

log = logging.getLogger("paceline.engine")


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Read `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`; `do_sample: false` alone is greedy.

    As in vLLM, an explicit temperature takes precedence over `do_sample`. A file that is not JSON, and values that are
    not numbers in their range, are ignored with a warning in the log: a model can be served without recommendations.
    """
    file = directory / FILE
    try:
        content = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so it recommends nothing: %s", file, error)
        return SamplingDefaults()
    if not isinstance(content, dict):
        return SamplingDefaults()
    values: dict[str, float] = {}
    for name, is_in_range in _RANGES.items():
        value = content.get(name)
        if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and is_in_range(value):
            values[name] = value
        elif value is not None:
            log.warning("%s: %s = %.40r cannot be used and is passed over", file, name, value)
    if content.get("do_sample") is False and "temperature" not in values:
        values["temperature"] = 0.0
    top_k = values.pop("top_k", None)
    return SamplingDefaults(**values, top_k=None if top_k is None else int(top_k))
