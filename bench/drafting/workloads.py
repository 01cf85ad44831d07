"""What `lookup_tree` is measured on: models, and the prompts of Spec-Bench's six tasks for each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.engine.base import Engine
from paceline.engine.loader import load_model
from paceline.errors import ConfigError
from paceline.models import CLOUD, DEVICE

from ..retrieval.articles import encyclopaedia
from .tiny_models import BOS, EOS, tiny_models

TASKS: Final = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
LONGEST: Final = 1024  # tokens of a prompt; of a longer one the beginning and the end

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its prompts."""

    name: str
    engine: Engine
    vocab_size: int
    eos_ids: frozenset[int]
    prompts: dict[str, list[Ids]]  # by task
    draft_model: Engine | None = None

    def every(self) -> list[Ids]:
        return [prompt for prompts in self.prompts.values() for prompt in prompts]


def questions(data: Path | None, count: int | None) -> dict[str, list[str]]:
    """The first turns of Spec-Bench's questions by task, or made-up ones of these kinds where there is no folder.

    count: of each task at most. Raises ConfigError for a folder without them.
    """
    if data is None:
        return _made_up(count or 8)
    file = data / "spec_bench" / "questions.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file} is missing: give a folder that holds Spec-Bench")
    found: dict[str, list[str]] = {task: [] for task in TASKS}
    for line in file.read_text("utf-8").splitlines():
        question = json.loads(line)
        if count is None or len(found[question["task"]]) < count:
            found[question["task"]].append(question["turns"][0])
    return found


def _made_up(count: int) -> dict[str, list[str]]:
    entries = encyclopaedia(random.Random(7), "train", count)
    chance = random.Random(8)
    found: dict[str, list[str]] = {task: [] for task in TASKS}
    for entry in entries:
        text, fact = entry.retelling, entry.facts[0][1]
        first, second = chance.randrange(2, 90), chance.randrange(2, 90)
        found["mt_bench"].append(f"Write a short letter to a friend about this: {fact}")
        found["translation"].append(f"Translate German to English: {fact}")
        found["summarization"].append(f"Summarize: {text}")
        found["qa"].append(f"What do you know of this? {fact}")
        found["math_reasoning"].append(f"I have {first} apples, buy {second} more and eat 2. How many are left?")
        found["rag"].append(f"Answer from this text. {text}\nWhat does it say first?")
    return found


def demo_pair(asked: dict[str, list[str]]) -> Subject:
    """The cloud's demonstration model; the device's drafts for it where a draft model is wanted."""
    cloud, device = load_model(CLOUD), load_model(DEVICE)

    def encode(text: str) -> Sequence[int]:
        return cloud.tokenizer.chat([{"role": "user", "content": text}])

    size = min(cloud.tokenizer.vocab_size, cloud.engine.info.vocab_size)
    return Subject("demo cloud", cloud.engine, size, cloud.tokenizer.eos_ids, _encoded(asked, encode), device.engine)


def real_and_tiny(data: Path | None, asked: dict[str, list[str]], tokens: int) -> list[Subject]:
    """Checkpoints of the data folder; none without one. Their context of 512 is left room for `tokens` to write."""
    if data is None:
        return []
    subjects = []
    for model in tiny_models(data):
        limit = model.engine.info.max_positions - tokens - 64
        prompts = _encoded(asked, lambda text, model=model: model.encode(text[:600]), limit)  # type: ignore[misc]
        ends = frozenset({BOS, EOS})
        subjects.append(Subject(model.name, model.engine, model.engine.info.vocab_size, ends, prompts))
    return subjects


def _encoded(
    asked: dict[str, list[str]], encode: Callable[[str], Sequence[int]], limit: int = LONGEST
) -> dict[str, list[Ids]]:
    def cut(ids: Sequence[int]) -> Ids:
        half = limit // 2
        return tuple(ids) if len(ids) <= limit else (*ids[:half], *ids[-half:])

    return {task: [cut(encode(text)) for text in texts] for task, texts in asked.items()}
