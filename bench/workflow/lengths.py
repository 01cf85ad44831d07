"""Lengths of questions, contexts and answers of the paper's four data sets: of their files, or built in.

Tokens are words times 1.3. Contexts have at most 1,024 tokens, as the paper leaves out longer ones. An answer is the
gold answer in a short sentence: 8 tokens more. FinQABench came without answers (those of FinanceBench stand in) and
TruthfulQA without contexts (the paper's 200 tokens).
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError

MAX_CONTEXT: Final = 1024  # tokens
SENTENCE: Final = 8  # tokens around a gold answer
TRUTHFUL_CONTEXT: Final = 200


@dataclass(frozen=True, slots=True)
class Lengths:
    """One question; tokens."""

    question: int
    context: int
    answer: int


@dataclass(frozen=True, slots=True)
class DataSet:
    name: str
    folder: str
    several_hops: bool
    built_in: Lengths  # means of the files


DATA_SETS: Final = (
    DataSet("FinQABench", "finance", False, Lengths(24, 342, 15 + SENTENCE)),
    DataSet("TruthfulQA", "truthfulqa", False, Lengths(14, TRUTHFUL_CONTEXT, 12 + SENTENCE)),
    DataSet("HotpotQA", "hotpotqa", True, Lengths(21, 990, 3 + SENTENCE)),
    DataSet("2WikiMultihopQA", "2wikimultihopqa", True, Lengths(16, 690, 3 + SENTENCE)),
)


def lengths_of(data_set: DataSet, data: Path | None, count: int) -> list[Lengths]:
    """Lengths of `count` questions, drawn with a fixed seed. Raises ConfigError for a folder without its files."""
    rng = random.Random(data_set.name)
    if data is None:
        mean = data_set.built_in
        return [
            Lengths(
                max(4, round(rng.gauss(mean.question, 0.3 * mean.question))),
                min(MAX_CONTEXT, max(40, round(rng.gauss(mean.context, 0.25 * mean.context)))),
                max(1, round(rng.gauss(mean.answer, 0.3 * mean.answer))),
            )
            for _ in range(count)
        ]
    folder = data / data_set.folder
    try:
        found = list(_READERS[data_set.folder](folder))
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename} is missing: give a folder with {data_set.name}, or none") from None
    rng.shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def tokens(text: str) -> int:
    return max(1, round(1.3 * len(text.split())))


def _finance(folder: Path) -> Iterator[Lengths]:
    passages = {str(row["pid"]): tokens(str(row["text"])) for row in _rows(folder / "finqabench_passages.jsonl")}
    sizes = list(passages.values())
    answers = [tokens(str(row["answer"])) for row in _rows(folder / "financebench.jsonl")]
    for number, row in enumerate(_rows(folder / "finqabench.jsonl")):
        gold = row["gold_passages"]
        assert isinstance(gold, list)
        context = sum(passages[pid] for pid in gold) or sizes[number % len(sizes)]
        answer = min(64, answers[number % len(answers)])
        yield Lengths(tokens(str(row["question"])), min(MAX_CONTEXT, context), answer + SENTENCE)


def _truthful(folder: Path) -> Iterator[Lengths]:
    for row in _rows(folder / "truthfulqa.jsonl"):
        answer = tokens(str(row["best_answer"])) + SENTENCE
        yield Lengths(tokens(str(row["question"])), TRUTHFUL_CONTEXT, answer)


def _hotpot(folder: Path) -> Iterator[Lengths]:
    for row in _rows(folder / "hotpotqa.jsonl.gz"):
        yield _with_paragraphs(row)


def _wiki(folder: Path) -> Iterator[Lengths]:
    for row in _rows(folder / "2wikimultihopqa.jsonl.gz"):
        yield _with_paragraphs(row)


def _with_paragraphs(row: dict[str, object]) -> Lengths:
    context = row["context"]
    assert isinstance(context, list)
    size = sum(tokens(str(each.get("text") or " ".join(each["sentences"]))) for each in context)
    return Lengths(tokens(str(row["question"])), min(MAX_CONTEXT, size), tokens(str(row["answer"])) + SENTENCE)


def _rows(file: Path) -> Iterator[dict[str, object]]:
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    for line in text.decode("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


_READERS: Final = {"finance": _finance, "truthfulqa": _truthful, "hotpotqa": _hotpot, "2wikimultihopqa": _wiki}
