"""`paceline bench notes`: notes and pages written by hand, and questions about them, answered by the demonstration.

44 documents and 196 questions in `questions/notes.json`, none of them in a training text: about one document, about a
private and a public one, and such as none answers. All private documents are stored on the device and all public ones
in the cloud; each question is searched for on both sides as in a request, two passages a side, and both sides write the
answer greedily, over a virtual network. An answer is right if an accepted text stands in it, one for each fact; where
nothing answers, if it says so: the demonstration's models in the sentence that they have been taught, real ones
(`--models`) in words of their own. The claims are on the questions of the half `test`; the other half may be looked at
by who changes the reader. The documents are the same in both halves. `questions/notes_dev.json` is a second set to look
at, of 22 other documents and 121 questions, which the bench does not ask.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from lab.demo_pair import Pair
from lab.training.texts.squad import normal_form
from paceline.core.side import SIDES, Side, WayOfReading
from paceline.engine.reader.answer import NOTHING, NOTHING_OF_SEVERAL
from paceline.models import CLOUD, DEVICE, READER
from paceline.rag.embedder import Embedder, load_embedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import unruled
from paceline.runtime.sessions.prompts import PromptSet, prompts_of

from .bootstrap import Estimate, share_of
from .findings import claimed
from .report import Options, Report

NAME = "notes"
SUMMARY = "what the demonstration reads in documents it has never seen"

SET: Final = Path(__file__).parent / "questions" / "notes.json"
TUNING: Final = SET.with_name("notes_dev.json")
PASSAGES: Final = 2  # a side, as by default
TARGETS: Final = {"single": 0.8, "two": 0.6, "none": 0.9}
CLAIMED: Final = "test"
DECLINES: Final = re.compile(
    r"(not|n't|never) (\w+ ){0,3}(mention|say|state|specif|provide|contain|include|give|list|describe|answer|have|know)"
    r"|\b(no|any) (\w+ )?(information|mention|details?)\b|unable to|cannot|can't|sorry",
    re.IGNORECASE,
)
"""Phrases by which models without a sentence of their own say that they find no answer."""
MODELS: Final = True
FEW: Final = 12  # questions of a kind

Half = Literal["dev", "test"]


@dataclass(frozen=True, slots=True)
class Question:
    kind: str  # here "single", "two" or "none"
    half: Half
    text: str
    documents: tuple[str, ...]  # that hold the facts, in the order of `answers`
    answers: tuple[tuple[str, ...], ...]  # of each fact the accepted texts; empty where nothing answers


@dataclass(frozen=True, slots=True)
class Document:
    side: Side
    name: str
    text: str


def load(file: Path = SET) -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    content = json.loads(file.read_text("utf-8"))
    documents = tuple(Document(each["side"], each["name"], each["text"]) for each in content["documents"])
    questions = tuple(
        Question(
            each["kind"],
            each["half"],
            each["question"],
            tuple(each["documents"]),
            tuple(tuple(texts) for texts in each["answers"]),
        )
        for each in content["questions"]
    )
    return documents, questions


def run(options: Options) -> Report:
    documents, questions = load()
    if options.quick:
        questions = tuple(each for kind in TARGETS for each in _of(questions, kind, CLAIMED)[:FEW])
    embedder = load_embedder("minilm")
    rows: list[dict[str, object]] = []
    shares: dict[str, Estimate] = {}
    with stored(documents, embedder) as stores:
        for name, loaded in _pairs(options).items():
            pair = loaded()
            right = {
                each: is_right(each, answer(pair, stores, each.text), declines=DECLINES if options.models else None)
                for each in questions
            }
            for kind in TARGETS:
                for half in ("dev", "test"):
                    asked = _of(questions, kind, half)
                    if asked:
                        share = share_of([right[each] for each in asked])
                        found = {"n": len(asked), "right": share.value, "interval_90": share.interval}
                        rows.append({"models": name, "questions": kind, "half": half, **found})
                        shares.setdefault(f"{kind} {half}", share)
    suffix, aims = ("_real", dict.fromkeys(TARGETS)) if options.models else ("", TARGETS)
    claims = tuple(
        claimed(f"notes.{kind}{suffix}", shares[f"{kind} {CLAIMED}"], aims[kind], "higher") for kind in TARGETS
    )
    return Report(NAME, conditions(options), rows, claims)


def conditions(options: Options) -> dict[str, object]:
    """Conditions of greedy answers from what both sides have found."""
    return {
        "embedder": "minilm",
        "passages": PASSAGES,
        "temperature": 0.0,
        "privacy": "document-private; at temperature 0 both levels write the same text",
        "interval_90": "resampled questions",
        "quick": options.quick,
    }


def _pairs(options: Options) -> Mapping[str, Callable[[], Pair]]:
    """Readers to ask, by name, each loaded when its turn comes."""
    if real := options.models:
        return {real.label: lambda: Pair({side: real.load(side) for side in SIDES})}
    return {"reader": lambda: Pair.load(READER, READER), "causal pair": lambda: Pair.load(DEVICE, CLOUD)}


def _of(questions: Sequence[Question], kind: str, half: str) -> tuple[Question, ...]:
    return tuple(each for each in questions if (each.kind, each.half) == (kind, half))


@contextmanager
def stored(documents: Sequence[Document], embedder: Embedder) -> Iterator[Mapping[Side, DocumentStore]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stores = {side: stack.enter_context(DocumentStore.open(folder / side, embedder, side=side)) for side in SIDES}
        for each in documents:
            stores[each.side].add_text(f"{each.name}.md", each.text, zone=each.side)
        yield stores


def answer(pair: Pair, stores: Mapping[Side, DocumentStore], question: str) -> str:
    """As a request would be answered: each side with what it finds, the device's documents at their constant weight."""
    return pair.write({side: prompts(pair, side, stores[side], question).branches for side in SIDES})


def prompts(pair: Pair, side: Side, store: DocumentStore, question: str) -> PromptSet:
    model, messages = pair.models[side], [{"role": "user", "content": question}]
    room = model.engine.info.max_positions // 2
    way: WayOfReading = "apart" if model.tokenizer.one_document else "together"
    prompts = prompts_of(messages, unruled(store), model.tokenizer, k=PASSAGES, max_prompt=room, reading=way)
    return prompts.without_relevance() if side == "device" else prompts


def is_right(question: Question, given: str, *, declines: re.Pattern[str] | None = None) -> bool:
    """Each fact's text stands in the answer as whole words; or the answer says that there is none, and only that.

    declines: what says so, for models without a sentence of their own for it."""
    if not question.answers and declines is not None:
        return declines.search(given) is not None
    if not question.answers:
        said = given.replace(NOTHING_OF_SEVERAL, NOTHING)
        return NOTHING in said and not re.sub(r"\.?\s*The \w+: ", "", said.replace(NOTHING, "")).strip(" .")
    text = f" {normal_form(given)} "
    return all(any(f" {normal_form(each)} " in text for each in texts) for texts in question.answers)
