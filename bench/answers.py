"""`paceline bench answers`: who reads how, and whether the answer is right; real models (`--models`) or the reader.

Questions about one document, about one on each side, and such as none answers: written by hand (`questions/`), and with
a data folder also from SQuAD (one side, or none) and HotpotQA and 2WikiMultihopQA (both, by type). Each side has the
two best passages of its own documents. Ways: each side alone; everything in one context, which privacy allows at the
device only; both sides together, each with its passages in one context or each in its own (`reading`), with weights
that follow the text or, as published, with fixed ones; and as served, a question in parts part by part, each read by
the sides whose passages answer it as the reader judges for small models (where none does, the answer is the sentence
that says so, without what a model may add in general). Greedy, with the program's own strategies and engines.

An answer is right if an accepted text of each fact stands in it as whole words, or, where nothing answers, if it says
so. It is faithful if each of its numbers and names stands in a passage that was read, or in the question. The questions
of the notes' half `test` are not asked here: they are for `bench notes`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from lab.demo_pair import Pair
from lab.training.texts.squad import normal_form
from paceline.core.side import SIDES, Side
from paceline.engine.reader.answer import NOTHING
from paceline.engine.reader.engine import load_pointer
from paceline.engine.reader.question import separate_questions
from paceline.models import READER
from paceline.rag.embedder import Embedder, load_embedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.questions import BETWEEN, UNANSWERED, Judge, is_judged
from paceline.runtime.sessions.prompts import PromptSet, prompts_of
from paceline.strategies.base import Branch

from .bootstrap import Estimate, estimate, share_of
from .findings import claimed
from .notes import DECLINES, PASSAGES, SET, TUNING, conditions, is_right, load, stored
from .notes import Question as Asked
from .report import Options, Report
from .two_sided import lines

NAME = "answers"
SUMMARY = "right answers of one side, of both, and of one context that holds everything"
MODELS: Final = True
T = TypeVar("T")
FEW, MANY = 8, 200  # questions of each kind
AT_ONCE: Final = 16  # answers that are written side by side
OWN: Final = ("single", "two", "none")  # kinds of `questions/`
ONE_SIDED: Final = ("squad", "squad, none")  # the other published kinds need both sides
JUDGE: Final = Judge(partial(load_pointer, READER))
NAMED: Final = re.compile(r"\b(?:[A-Z][\w'-]+|\w*\d[\w.:/-]*\b)")


@dataclass(frozen=True, slots=True)
class Way:
    reads: Mapping[Side, Sequence[Side]]  # whose passages each side reads that writes
    options: Mapping[str, object] = field(default_factory=dict)
    apart: bool = False
    as_served: bool = False  # in parts, and judged


BOTH: Final[Mapping[Side, Sequence[Side]]] = {side: (side,) for side in SIDES}
TOGETHER: Final = "as served"
ONE_CONTEXT: Final = ("one context, device", "one context, cloud")
WAYS: Final[Mapping[str, Way]] = {
    "device": Way({"device": ("device",)}),
    "cloud": Way({"cloud": ("cloud",)}),
    ONE_CONTEXT[0]: Way({"device": ("device", "cloud")}),
    ONE_CONTEXT[1]: Way({"cloud": ("cloud", "device")}),
    TOGETHER: Way(BOTH, as_served=True),
    "whole and not judged": Way(BOTH),
    "fixed weights": Way(BOTH, {"rescoring": False}),
    "passages apart": Way(BOTH, apart=True),
    "as published": Way(BOTH, {"rescoring": False}, apart=True),
}


@dataclass(frozen=True, slots=True)
class Question:
    asked: Asked
    search: Callable[[str], Mapping[Side, Sequence[Passage]]]  # of both sides' documents


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question as one way asks it."""

    asked: Asked
    parts: Sequence[Mapping[Side, Sequence[Branch]]]  # prompts by part of the question; none: nothing answers it
    known: str  # what was read, and the question


@dataclass(frozen=True, slots=True)
class Outcome:
    right: bool
    faithful: bool
    declines: bool  # says, perhaps of one part, that nothing answers it
    length: int  # characters


def run(options: Options) -> Report:
    embedder, count = load_embedder("minilm"), FEW if options.quick else MANY
    real = options.models
    pair = Pair({side: real.load(side) for side in SIDES}) if real else Pair.load(READER, READER)
    ways = WAYS
    if pair.models["device"].engine.info.fingerprint == pair.models["cloud"].engine.info.fingerprint:
        ways = {name: way for name, way in WAYS.items() if name != ONE_CONTEXT[1]}  # the same model
    found: dict[str, dict[str, list[Outcome]]] = {}
    with kinds(options.data, count, embedder) as asked:
        for kind, questions in asked.items():
            found[kind] = {
                name: outcomes(pair, way, questions, declines=DECLINES if real else None) for name, way in ways.items()
            }
    return reported(found, real.label if real else "reader", conditions(options), "_real" if real else "")


def reported(
    found: Mapping[str, Mapping[str, Sequence[Outcome]]], models: str, told: Mapping[str, object], suffix: str
) -> Report:
    """found: by kind and way. suffix: of the claims' names."""
    rows: list[dict[str, object]] = []
    for kind, of in found.items():
        for name, each in of.items():
            share = share_of([outcome.right for outcome in each])
            row = {"questions": kind, "way": name, "n": len(each), "right": share.value, "interval_90": share.interval}
            means = {field: sum(getattr(one, field) for one in each) / len(each) for field in ("faithful", "declines")}
            rows.append({**row, **means, "characters": sum(outcome.length for outcome in each) / len(each)})
    claims = [
        claimed(f"answers.two_vs_one_context{suffix}", _ratio(found["two"], ONE_CONTEXT), 0.95, "higher"),
        claimed(f"answers.single_vs_better_side{suffix}", _gain(found["single"], SIDES), 0.98, "higher"),
        claimed(f"answers.none{suffix}", share_of([each.right for each in found["none"][TOGETHER]]), 0.9, "higher"),
    ]
    if published := [of for kind, of in found.items() if kind not in OWN and kind not in ONE_SIDED]:
        pooled = {
            name: [each for of in published for each in of[name]]
            for name in (TOGETHER, *ONE_CONTEXT, *SIDES)
            if name in published[0]
        }
        worst = min((_gain(of, SIDES) for of in published), key=lambda gain: gain.value)
        claims += [
            claimed(f"answers.published_vs_one_context{suffix}", _ratio(pooled, ONE_CONTEXT), 0.95, "higher"),
            claimed(f"answers.published_worst_vs_better_side{suffix}", worst, 0.98, "higher"),
        ]
    return Report(NAME, {"models": models, **told}, rows, tuple(claims))


def _best(of: Mapping[str, Sequence[Outcome]], names: Sequence[str]) -> Sequence[Outcome]:
    return max((of[name] for name in names if name in of), key=lambda outcomes: sum(each.right for each in outcomes))


def _ratio(of: Mapping[str, Sequence[Outcome]], names: Sequence[str]) -> Estimate:
    ours, best = of[TOGETHER], _best(of, names)
    return estimate(
        len(ours), lambda among: sum(ours[i].right for i in among) / max(1, sum(best[i].right for i in among))
    )


def _gain(of: Mapping[str, Sequence[Outcome]], names: Sequence[str]) -> Estimate:
    """1 plus what share of the questions is answered rightly beyond the best of these ways."""
    ours, best = of[TOGETHER], _best(of, names)
    return estimate(len(ours), lambda among: 1.0 + sum(ours[i].right - best[i].right for i in among) / len(among))


# ---- answers ---------------------------------------------------------------------------------------------------------
def outcomes(pair: Pair, way: Way, questions: Sequence[Question], *, declines: re.Pattern[str] | None) -> list[Outcome]:
    """declines: as of `notes.is_right`; None for the reader, which takes questions apart and judges by itself."""
    found: list[Outcome] = []
    for start in range(0, len(questions), AT_ONCE):
        prepared = [prepare(pair, way, each, real=declines is not None) for each in questions[start : start + AT_ONCE]]
        written = iter(pair.write_each([part for each in prepared for part in each.parts if part], way.options))
        for each in prepared:
            texts = [next(written) if part else UNANSWERED for part in each.parts]
            found.append(outcome(each, BETWEEN.join(texts), declines=declines))
    return found


def prepare(pair: Pair, way: Way, question: Question, *, real: bool) -> Prepared:
    served = way.as_served and real
    parts = separate_questions(question.asked.text) if served else ()
    sides = {each for read in way.reads.values() for each in read}
    branches: list[Mapping[Side, Sequence[Branch]]] = []
    known = [question.asked.text]
    for part in parts or (question.asked.text,):
        found = question.search(part)
        prompts = {side: prompted(pair, side, way, part, found, judged=served) for side in way.reads}
        read = {side: each for side, each in prompts.items() if each.num_passages}
        denied = not read and any(each.unanswered for each in prompts.values())
        branches.append({} if denied else {side: each.branches for side, each in (read or prompts).items()})
        known += [passage.titled for side in sides for passage in found[side]]
    return Prepared(question.asked, branches, " ".join(known))


def outcome(prepared: Prepared, text: str, *, declines: re.Pattern[str] | None) -> Outcome:
    stands = f" {normal_form(prepared.known)} "
    names = [normal_form(name) for name in NAMED.findall(text.partition(" ")[2])]  # the first word is a capital anyway
    return Outcome(
        is_right(prepared.asked, text, declines=declines),
        all(f" {name} " in stands for name in names if name),
        declines.search(text) is not None if declines else NOTHING in text,
        len(text),
    )


def prompted(
    pair: Pair, side: Side, way: Way, text: str, found: Mapping[Side, Sequence[Passage]], *, judged: bool
) -> PromptSet:
    model, messages = pair.models[side], [{"role": "user", "content": text}]
    own, *others = [found[each] for each in way.reads[side]]
    prompts = prompts_of(
        messages,
        None,
        model.tokenizer,
        k=PASSAGES,
        max_prompt=model.engine.info.max_positions // 2,
        found=own,
        others=others[0] if others else (),
        reading="apart" if way.apart or model.tokenizer.one_document else "together",
        judge=JUDGE if judged and is_judged(model.engine.info, model.tokenizer) else None,
    )
    joint = len(way.reads) > 1 and side == "device"  # as in a request
    return prompts.without_relevance() if joint else prompts


# ---- questions -------------------------------------------------------------------------------------------------------
@contextmanager
def kinds(data: Path | None, count: int, embedder: Embedder) -> Iterator[Mapping[str, Sequence[Question]]]:
    """Questions by kind, at most `count` of each, evenly spread over the sets."""
    found: dict[str, list[Question]] = {}
    with ExitStack() as stack:
        for file in (SET, TUNING):
            documents, asked = load(file)
            stores = stack.enter_context(stored(documents, embedder))
            for each in asked:
                if each.half == "dev":
                    found.setdefault(each.kind, []).append(Question(each, partial(_search, stores)))
        if data is not None:
            for question in _read(data / "two_sided_qa", embedder, count):
                found.setdefault(question.asked.kind, []).append(question)
        yield {kind: _spread(questions, count) for kind, questions in found.items()}


def _search(stores: Mapping[Side, DocumentStore], text: str) -> Mapping[Side, Sequence[Passage]]:
    return {side: stores[side].search(text, PASSAGES) for side in SIDES}


def _read(folder: Path, embedder: Embedder, count: int) -> Iterator[Question]:
    """Questions of the published sets: of one side, such as none answers (SQuAD 2), and of both by type."""
    for name in ("single_side", "both_sides"):
        texts = {each["pid"]: str(each["text"]) for each in lines(folder / f"{name}_paragraphs.jsonl.gz")}
        usable: dict[str, list[dict[str, Any]]] = {}
        for record in lines(folder / f"{name}.jsonl"):
            kind = ONE_SIDED[not record["answers"]]
            usable.setdefault(record.get("type", kind), []).append(record)
        for kind, records in usable.items():
            for record in _spread(records, count):
                paragraphs = {side: {pid: texts[pid] for pid in record[f"{side}_paragraphs"]} for side in SIDES}
                answers = (tuple(record["answers"]),) if record["answers"] else ()
                asked = Asked(kind, "dev", record["question"], (), answers)
                yield Question(asked, partial(_found, embedder, paragraphs))


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """As many of them at most, evenly."""
    number = min(count, len(items))
    return [items[at * len(items) // number] for at in range(number)]


def _found(
    embedder: Embedder, paragraphs: Mapping[Side, Mapping[str, str]], question: str
) -> Mapping[Side, Sequence[Passage]]:
    found: dict[Side, Sequence[Passage]] = {}
    for side, texts in paragraphs.items():
        vectors = embedder.embed([question, *texts.values()])
        scores = dict(zip(texts, (vectors[1:] @ vectors[0]).tolist(), strict=True))
        best = sorted(texts, key=lambda pid: -scores[pid])[:PASSAGES]
        found[side] = [Passage(pid, -1, "", texts[pid], scores[pid]) for pid in best]
    return found
