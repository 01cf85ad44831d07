"""`paceline bench two_sided`: questions with evidence on two sides, answered by both together and by each side alone.

The demo pair, greedily, with the program's own strategies over a virtual network; documents weighted by MiniLM, as in
a request. Three kinds of questions: generated ones, where each side's document holds one of the two facts in question;
with a data folder also real ones with evidence on both sides (HotpotQA, 2WikiMultihopQA) or on one of them (SQuAD,
titles held out of training), with the best paragraph of each side as its document. The claims are on the generated
set: the pair was trained on such sentences and reads hardly any others. Real models (`--models`) are asked the real
questions alone.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.demo_pair import Pair
from lab.training.evaluate import both_sides
from lab.training.texts.names import split_of
from lab.training.texts.squad import normal_form
from paceline.core.side import SIDES, Side
from paceline.errors import ConfigError
from paceline.models import CLOUD, DEVICE
from paceline.rag.embedder import Embedder, load_embedder

from .bootstrap import Estimate, estimate, share_of, worst_of
from .findings import claimed
from .report import Claim, Options, Report

NAME = "two_sided"
SUMMARY = "exact answers to two-sided questions: both sides together against each alone"

TOGETHER: Final = "aggregate"
WAYS: Final[Mapping[str, tuple[Side, ...]]] = {TOGETHER: SIDES, "device only": ("device",), "cloud only": ("cloud",)}
GENERATED: Final = "generated"
READERS: Final[tuple[Side, Side]] = ("device", "cloud")  # sides of a generated question's documents, in order
SEED: Final = 13
FEW, MANY = 20, 200  # questions of each kind
MODELS: Final = True


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]  # each is correct
    documents: Mapping[Side, str]
    is_exact: bool  # the answer must equal an expected one; else contain it


def run(options: Options) -> Report:
    count = FEW if options.quick else MANY
    embedder, real_ones = load_embedder("minilm"), options.models
    if real_ones and options.data is None:
        raise ConfigError("Real models are asked real questions: give their folder with --data.")
    pair = Pair({side: real_ones.load(side) for side in SIDES}) if real_ones else Pair.load(DEVICE, CLOUD, threads=1)
    searched = Pair(pair.models, embedder)
    kinds = {} if real_ones else {GENERATED: list(generated(count))}
    if options.data is not None:
        folder = options.data / "two_sided_qa"
        kinds |= {name: list(real(folder, name, count, embedder)) for name in ("both_sides", "single_side")}
    right = {
        kind: {way: answered(searched, questions, sides) for way, sides in WAYS.items()}
        for kind, questions in kinds.items()
    }
    rows: list[dict[str, object]] = [
        {
            "questions": kind,
            "n": len(questions),
            **{way: share_of(of_way).value for way, of_way in right[kind].items()},
            "interval_90": {way: share_of(of_way).interval for way, of_way in right[kind].items()},
        }
        for kind, questions in kinds.items()
    ]
    claims = _real_claims(right) if real_ones else _claims(right[GENERATED])
    conditions = {
        "models": real_ones.label if real_ones else "demo pair",
        "embedder": "minilm",
        "temperature": 0.0,
        "seed": SEED,
        "privacy": "document-private; at temperature 0 both levels write the same text",
        "interval_90": "resampled questions",
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def _claims(right: Mapping[str, Sequence[bool]]) -> tuple[Claim, ...]:
    together, *alone = right.values()
    return (
        claimed("two_sided.generated", share_of(together), 0.9, "higher"),
        claimed(
            "two_sided.alone_vs_together", worst_of((_relative(way, together) for way in alone), "lower"), 0.5, "lower"
        ),
    )


def _real_claims(right: Mapping[str, Mapping[str, Sequence[bool]]]) -> tuple[Claim, ...]:
    """For each kind, the share of questions that both sides answer, less that of the better side alone."""
    claims = []
    for kind, of in right.items():
        together, *alone = of.values()
        better = max(alone, key=sum)
        claims.append(claimed(f"two_sided.{kind}_gain_real", _gained(together, better), None, "higher"))
    return tuple(claims)


def _gained(right: Sequence[bool], reference: Sequence[bool]) -> Estimate:
    return estimate(len(right), lambda among: sum(right[i] - reference[i] for i in among) / len(among))


def answered(pair: Pair, questions: Sequence[Question], sides: Sequence[Side]) -> list[bool]:
    """Which of the questions these sides answer correctly, each from its own document."""
    answers = [pair.answer(each.text, {side: each.documents[side] for side in sides}) for each in questions]
    return [is_correct(question, answer) for question, answer in zip(questions, answers, strict=True)]


def _relative(right: Sequence[bool], reference: Sequence[bool]) -> Estimate:
    """Right answers for each of the reference's, of the same questions."""
    return estimate(
        len(right), lambda among: sum(right[i] for i in among) / max(1e-9, sum(reference[i] for i in among))
    )


def is_correct(question: Question, answer: str) -> bool:
    if question.is_exact:
        return answer in question.answers
    text = f" {normal_form(answer)} "
    return any(f" {normal_form(expected)} " in text for expected in question.answers)


# ---- questions -------------------------------------------------------------------------------------------------------
def generated(count: int) -> Iterator[Question]:
    rng = random.Random(SEED)
    for _ in range(count):
        drawn = both_sides(rng)
        documents: dict[Side, str] = {side: text or "" for side, text in zip(READERS, drawn.documents, strict=True)}
        yield Question(drawn.turn.question, (drawn.turn.answer,), documents, is_exact=True)


def real(folder: Path, name: str, count: int, embedder: Embedder) -> Iterator[Question]:
    """A sample with a fixed seed of the set's answerable questions, without those that the pair was trained on."""
    texts = {each["pid"]: str(each["text"]) for each in lines(folder / f"{name}_paragraphs.jsonl.gz")}
    usable = [
        each
        for each in lines(folder / f"{name}.jsonl")
        if each["answers"]
        and each.get("answerable", True)
        and ("title" not in each or split_of(each["title"]) == "held_out")
    ]
    for each in random.Random(SEED).sample(usable, min(count, len(usable))):
        documents = {
            side: _best(embedder, each["question"], [texts[pid] for pid in each[f"{side}_paragraphs"]])
            for side in SIDES
        }
        yield Question(each["question"], tuple(each["answers"]), documents, is_exact=False)


def _best(embedder: Embedder, question: str, paragraphs: Sequence[str]) -> str:
    vectors = embedder.embed([question, *paragraphs])
    return paragraphs[int((vectors[1:] @ vectors[0]).argmax())]


def lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
