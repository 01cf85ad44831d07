"""Recommended sampling settings of a model: `generation_config.json`, as transformers writes it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

from paceline.core.sampling.sampler import SamplingDefaults

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
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not is_in_range(value)
        ):
            log.warning("%s: %s = %.40r cannot be used and is passed over", file, name, value)
            continue
        values[name] = value
    if content.get("do_sample") is False and "temperature" not in values:
        values["temperature"] = 0.0
    top_k = values.pop("top_k", None)
    return SamplingDefaults(**values, top_k=None if top_k is None else int(top_k))
