"""What a model is, before its weights are loaded: from its configuration alone."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.engine.base import ModelInfo
from paceline.engine.generation_config import sampling_defaults
from paceline.engine.loader import find, fingerprint
from paceline.errors import ConfigError
from paceline.hub.facts import facts_of


def describe_model(path_or_name: str | Path, *, name: str) -> ModelInfo:
    """The model as `load_model` will find it, except for what is known once it is loaded: number format, backend and
    number of weights, which are empty.

    A model of the hub is fetched first. Raises ConfigError for what is no model that can be loaded.
    """
    if re.fullmatch(r"fake(:.*)?", str(path_or_name)):
        from dataclasses import replace

        from paceline.engine.loader import load_model

        return replace(load_model(path_or_name).engine.info, name=name)
    directory = find(path_or_name)
    facts = facts_of(directory)
    if facts.kind == "reader":
        from paceline.engine.tokenizer import Tokenizer

        positions, vocabulary = facts.context or 0, Tokenizer.load(directory).vocab_size
    else:
        positions, vocabulary = _configured(directory)
    return ModelInfo(
        name=name,
        fingerprint=fingerprint(directory),
        vocab_size=vocabulary,
        max_positions=positions,
        dtype="",
        backend="",
        sampling=sampling_defaults(directory),
    )


def weight_bytes(path_or_name: str | Path) -> int:
    """Size of the weights on the disk; 0 for the fake model."""
    directory = None if re.fullmatch(r"fake(:.*)?", str(path_or_name)) else find(path_or_name, download=False)
    return 0 if directory is None else sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _configured(directory: Path) -> tuple[int, int]:
    """(positions, size of the vocabulary)"""
    from transformers import AutoConfig

    from paceline.engine.model_config import max_positions

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return max_positions(config), int(config.get_text_config().vocab_size)
    except Exception as error:  # unknown architectures and odd configurations raise errors of any type
        raise ConfigError(f"{directory} cannot be loaded: {error}") from error
