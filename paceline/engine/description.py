"""Description of a model from its configuration alone, before its weights are loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.engine.base import ModelInfo
from paceline.engine.generation_config import sampling_defaults
from paceline.engine.loader import find, fingerprint, load_model
from paceline.errors import ConfigError
from paceline.hub.facts import facts_of


@dataclass(frozen=True, slots=True)
class Description:
    info: ModelInfo  # number format, backend and number of weights are empty: they are known once it is loaded
    tokenizer: str  # its fingerprint
    weights: int  # bytes of them on the disk; 0: they are none


def describe_model(path_or_name: str | Path, *, name: str) -> Description:
    """The model as `load_model` will find it. One of the hub is fetched first.

    Raises ConfigError for what is no model that can be loaded.
    """
    if re.fullmatch(r"fake(:.*)?", str(path_or_name)):
        fake = load_model(path_or_name)
        return Description(replace(fake.engine.info, name=name), fake.tokenizer.fingerprint, 0)
    from paceline.engine.tokenizer import Tokenizer

    directory = find(path_or_name)
    tokenizer, facts = Tokenizer.load(directory), facts_of(directory)
    is_reader = facts.kind == "reader"  # no architecture of transformers
    positions, vocabulary = (facts.context or 0, tokenizer.vocab_size) if is_reader else _configured(directory)
    info = ModelInfo(
        name, fingerprint(directory), vocabulary, positions, dtype="", backend="", sampling=sampling_defaults(directory)
    )
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return Description(info, tokenizer.fingerprint, weights)


def _configured(directory: Path) -> tuple[int, int]:
    """(positions, size of the vocabulary)"""
    from transformers import AutoConfig

    from paceline.engine.model_config import max_positions

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return max_positions(config), int(config.get_text_config().vocab_size)
    except Exception as error:  # unknown architectures and odd configurations raise errors of any type
        raise ConfigError(f"{directory} cannot be loaded: {error}") from error
