"""SQuAD questions as conversations: real text besides the generated facts. Titles are split by hash."""

import gzip
import json
import random
import re
import string
from collections import defaultdict
from pathlib import Path
from typing import Any

from lab.training.texts.corpus import Conversation, Turn
from lab.training.texts.names import Split, split_of

_WORDS_AROUND = 100


def records(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


class Squad:
    """Answerable questions of one split, by paragraph."""

    def __init__(self, data: Path, split: Split) -> None:
        texts = {r["pid"]: r["text"] for r in records(data / "squad" / "paragraphs.jsonl.gz")}
        grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in records(data / "squad" / "questions.jsonl.gz"):
            if record["answers"] and split_of(record["title"]) == split:
                grouped[record["pid"]].append(record)
        self.items = [(texts[pid], questions) for pid, questions in grouped.items()]
        self.questions = [(text, record) for text, asked in self.items for record in asked]

    def converse(self, rng: random.Random, turns: int = 3) -> Conversation:
        """Draw a few questions to one crop of a paragraph, among those whose answer lies in the crop."""
        text, asked = rng.choice(self.items)
        document = crop(rng, text, min(rng.choice(asked)["answers"], key=len))
        fitting = [r for r in asked if min(r["answers"], key=len) in document]
        chosen = rng.sample(fitting, min(turns, len(fitting)))
        return Conversation(document, [Turn(r["question"].strip(), answer_text(r)) for r in chosen])

    @staticmethod
    def crop_for(rng: random.Random, text: str, record: dict[str, Any]) -> str:
        return crop(rng, text, min(record["answers"], key=len))


def answer_text(record: dict[str, Any]) -> str:
    shortest: str = min(record["answers"], key=len)
    return shortest.rstrip(".") + "."


def normal_form(text: str) -> str:
    """Normalise an answer as SQuAD does: no case, no punctuation, no articles, single spaces."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def crop(rng: random.Random, text: str, answer: str, around: int = _WORDS_AROUND) -> str:
    """Cut out at most about `around` words of the paragraph, around the answer."""
    words = text.split(" ")
    if len(words) <= around:
        return text
    at = max(0, text.find(answer))
    first = text[:at].count(" ")
    needed = answer.count(" ") + 1
    low = max(0, first + needed - around)
    high = min(first, len(words) - around)
    start = rng.randint(min(low, high), max(low, high))
    return " ".join(words[start : start + around])
