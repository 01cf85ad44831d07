"""Workloads of `lookup_tree`: models, each with the prompts of Spec-Bench's six tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.side import Side
from paceline.engine.base import Engine, LoadedModel
from paceline.engine.loader import load_model
from paceline.errors import ConfigError
from paceline.models import CLOUD, DEVICE

from ..retrieval.articles import encyclopaedia
from .tiny_models import BOS, EOS, tiny_models

TASKS: Final = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MAX_PROMPT: Final = 1024  # tokens; of a longer prompt the beginning and the end are used

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelPrompts:
    """A model with its encoded prompts."""

    name: str
    engine: Engine
    vocab_size: int
    eos_ids: frozenset[int]
    prompts: dict[str, list[Ids]]  # by task
    draft_model: Engine | None = None

    def every(self) -> list[Ids]:
        return [prompt for prompts in self.prompts.values() for prompt in prompts]


def questions(data: Path | None, count: int | None) -> dict[str, list[str]]:
    """First turns of Spec-Bench's questions by task, or generated ones of the same kinds without a data folder.

    count: maximum per task. Raises ConfigError for a folder without the file.
    """
    if data is None:
        return _generated(count or 8)
    file = data / "spec_bench" / "questions.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file} is missing: give a folder that holds Spec-Bench")
    texts: dict[str, list[str]] = {task: [] for task in TASKS}
    for line in file.read_text("utf-8").splitlines():
        question = json.loads(line)
        if count is None or len(texts[question["task"]]) < count:
            texts[question["task"]].append(question["turns"][0])
    return texts


def _generated(count: int) -> dict[str, list[str]]:
    entries = encyclopaedia(random.Random(7), "train", count)
    chance = random.Random(8)
    texts: dict[str, list[str]] = {task: [] for task in TASKS}
    for entry in entries:
        retelling, fact = entry.retelling, entry.facts[0][1]
        first, second = chance.randrange(2, 90), chance.randrange(2, 90)
        texts["mt_bench"].append(f"Write a short letter to a friend about this: {fact}")
        texts["translation"].append(f"Translate German to English: {fact}")
        texts["summarization"].append(f"Summarize: {retelling}")
        texts["qa"].append(f"What do you know of this? {fact}")
        texts["math_reasoning"].append(f"I have {first} apples, buy {second} more and eat 2. How many are left?")
        texts["rag"].append(f"Answer from this text. {retelling}\nWhat does it say first?")
    return texts


def demo_pair(texts: dict[str, list[str]]) -> ModelPrompts:
    """The cloud's demonstration model, with the device's as draft model."""
    return chat_prompts("demo cloud", {"cloud": load_model(CLOUD), "device": load_model(DEVICE)}, texts)


def chat_prompts(
    name: str, models: Mapping[Side, LoadedModel], texts: dict[str, list[str]], limit: int = MAX_PROMPT
) -> ModelPrompts:
    """The cloud's model, with the device's as draft model; each text as the first message of a chat."""
    cloud = models["cloud"]

    def encode(text: str) -> Sequence[int]:
        return cloud.tokenizer.chat([{"role": "user", "content": text}])

    size = min(cloud.tokenizer.vocab_size, cloud.engine.info.vocab_size)
    encoded = _encoded(texts, encode, limit)
    return ModelPrompts(name, cloud.engine, size, cloud.tokenizer.eos_ids, encoded, models["device"].engine)


def tiny_model_prompts(data: Path | None, texts: dict[str, list[str]], tokens: int) -> list[ModelPrompts]:
    """Tiny models of the data folder; none without one. Prompts leave room for `tokens` in their context of 512."""
    if data is None:
        return []
    loaded = []
    for model in tiny_models(data):
        limit = model.engine.info.max_positions - tokens - 64
        prompts = _encoded(texts, lambda text, model=model: model.encode(text[:600]), limit)  # type: ignore[misc]
        eos_ids = frozenset({BOS, EOS})
        loaded.append(ModelPrompts(model.name, model.engine, model.engine.info.vocab_size, eos_ids, prompts))
    return loaded


def _encoded(
    texts: dict[str, list[str]], encode: Callable[[str], Sequence[int]], limit: int = MAX_PROMPT
) -> dict[str, list[Ids]]:
    def cut(ids: Sequence[int]) -> Ids:
        half = limit // 2
        return tuple(ids) if len(ids) <= limit else (*ids[:half], *ids[-half:])

    return {task: [cut(encode(text)) for text in of_task] for task, of_task in texts.items()}
