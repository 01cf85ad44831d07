"""Kind, context and chat template of a model's folder, read without transformers; None for what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["chat", "reader", "encoder", "other"]
"""chat: a causal model; encoder: for vectors or relevance; other: cannot be run here."""

_ENCODERS: Final = ("ForSequenceClassification", "ForMaskedLM", "Model")
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    kind: Kind
    architecture: str  # empty: not known
    context: int | None  # tokens; None: not known
    has_template: bool  # else conversations are written as ChatML


def facts_of(directory: Path) -> ModelFacts:
    config = _object(directory / "config.json")
    text = config.get("text_config")
    texts: tuple[Mapping[str, object], ...] = (config, text) if isinstance(text, Mapping) else (config,)
    lengths = (each.get(name) for each in texts for name in _LENGTHS)
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    architecture = named if isinstance(named, str) else ""
    return ModelFacts(
        _kind(directory, architecture),
        architecture,
        next((length for length in lengths if isinstance(length, int)), None),
        (directory / "chat_template.jinja").is_file()
        or any(
            "chat_template" in _object(directory / name) for name in ("tokenizer_config.json", "chat_template.json")
        ),
    )


def size_of(directory: Path) -> int:
    """Bytes of a folder's own files."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())


def _kind(directory: Path, architecture: str) -> Kind:
    if architecture == "paceline_reader":
        return "reader"
    if not any(directory.glob("*.safetensors")):
        return "other"
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "chat"
    return "encoder" if architecture.endswith(_ENCODERS) else "other"


def _object(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
