"""Configurations of machines by the names of their fields, whichever part has them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import Side
from paceline.strategies.base import DraftingMeans, MachineConfig, OutputRules, Seat
from paceline.wire.messages import DEFAULT_OPTIONS, Options

PARTS = {"seat": Seat, "output": OutputRules, "means": DraftingMeans}
PART_OF = {field.name: part for part, kind in PARTS.items() for field in fields(kind)}


def a_config(
    side: Side,
    faces_client: bool,
    sampling: SamplingParams,
    max_tokens: int,
    eos_ids: frozenset[int],
    vocab_size: int,
    options: Options = DEFAULT_OPTIONS,
    **changes: Any,
) -> MachineConfig:
    output = OutputRules(sampling, max_tokens, eos_ids, vocab_size)
    return changed(MachineConfig(Seat(side, faces_client), output, options), **changes)


def changed(config: MachineConfig, **changes: Any) -> MachineConfig:
    """The configuration with these fields."""
    for name, value in changes.items():
        if name == "options":
            config = replace(config, options=value)
            continue
        part = PART_OF[name]
        config = replace(config, **{part: replace(getattr(config, part), **{name: value})})
    return config
