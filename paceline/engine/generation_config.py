"""What a model's makers recommend for sampling: `generation_config.json`, as transformers writes it."""

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
    "repetition_penalty": lambda value: 0 < value <= 10,
    "top_k": lambda value: 0 <= value < 2**31 and value == int(value),
}

log = logging.getLogger("paceline.engine")


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Its `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`; `do_sample: false` alone is greedy.

    As vLLM reads it, a temperature that is given counts whatever `do_sample` says. What is not a number in its range,
    or not JSON, is passed over with a word in the log: a model can be served without recommendations.
    """
    file = directory / FILE
    try:
        read = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so it recommends nothing: %s", file, error)
        return SamplingDefaults()
    if not isinstance(read, dict):
        return SamplingDefaults()
    found: dict[str, float] = {}
    for name, holds in _RANGES.items():
        value = read.get(name)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not holds(value)
        ):
            log.warning("%s: %s = %.40r cannot be used and is passed over", file, name, value)
            continue
        found[name] = value
    if read.get("do_sample") is False and "temperature" not in found:
        found["temperature"] = 0.0
    top_k = found.pop("top_k", None)
    return SamplingDefaults(**found, top_k=None if top_k is None else int(top_k))
