"""Questions about folders of everyday files, each with the passages that a search finds: what serving is made of.

`folders.jsonl.gz` has a folder a line: files by name, questions with the file and the words that answer (`near`: a part
of the file that holds these words once), and questions that nothing in the folder answers, though it speaks of their
things. All is invented, and written for this. The shipped reader has learnt from the first 220; the other 72 are
younger. The rivals of an answer are those that a search would bring up, so that what is learnt is to choose among
passages, and when to say that none answers.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from lab.training.reading.examples import Example, Span, occurrences
from paceline.core.words import folded
from paceline.rag.embedder import Embedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore

FILE: Final = Path(__file__).with_name("folders.jsonl.gz")
PASSAGES: Final = 8  # that a search finds at most
_PIECE: Final = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"(])|\n+")  # ends of sentences and lines
_WORD: Final = re.compile(r"\w+")
_ALIKE: Final = 0.6  # share of the words around an answer that a row of a table must have to be its place
_TITLED: Final = 0.7  # share of parts of a passage that keep its first line


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    file: str = ""  # that answers; "" where none does
    answer: str = ""
    near: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    name: str
    files: dict[str, str]
    questions: tuple[Question, ...]


def folders(file: Path = FILE) -> list[Folder]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [_folder(json.loads(line)) for line in lines]


def _folder(content: dict[str, Any]) -> Folder:
    answered = (Question(each["q"], each["file"], each["a"], each["near"]) for each in content["questions"])
    unanswered = (Question(each) for each in content["none"])
    return Folder(content["name"], content["files"], (*answered, *unanswered))


def asked(folder: Folder, embedder: Embedder) -> Iterator[list[Example]]:
    """Each question with its passages, best first, as the reader sees them. A passage of which it is not known whether
    it answers is left out, and so is a question for which nothing is found."""
    with tempfile.TemporaryDirectory() as made:
        files = Path(made) / "files"
        files.mkdir()
        for name, text in folder.files.items():
            (files / name).write_text(text, "utf-8")
        with DocumentStore.open(Path(made) / "docs", embedder, side="cloud") as store:
            store.add(files, zone="cloud")
            for question in folder.questions:
                found = [_example(question, each) for each in store.search(question.text, PASSAGES)]
                if known := [each for each in found if each is not None]:
                    yield known


def _example(question: Question, passage: Passage) -> Example | None:
    document = passage.titled
    places = occurrences(document, question.answer)
    if Path(passage.document).name != question.file:
        return None if places else Example(question.text, document, ())
    around = re.compile(r"\s+".join(map(re.escape, question.near.split()))).search(document)
    if around and (within := [span for span in places if around.start() <= span[0] and span[1] <= around.end()]):
        return Example(question.text, document, tuple(within))
    if not places:
        return Example(question.text, document, ())
    words = set(_WORD.findall(folded(question.near)))  # of a row, which a table's reader writes otherwise than the file
    alike = [len(words.intersection(_WORD.findall(folded(_line(document, span))))) for span in places]
    if max(alike) < _ALIKE * len(words):
        return None
    return Example(question.text, document, tuple(s for s, n in zip(places, alike, strict=True) if n == max(alike)))


def _line(document: str, span: Span) -> str:
    end = document.find("\n", span[1])
    return document[document.rfind("\n", 0, span[0]) + 1 : end if end >= 0 else len(document)]


def varied(rng: random.Random, examples: Sequence[Example], parts: int) -> Iterator[Example]:
    """The examples; of each that answers, parts of its passage around the answer, and the passage without the sentences
    or lines that answer."""
    for example in examples:
        yield example
        if not example.spans:
            continue
        pieces = _pieces(example.document)
        for _ in range(parts):
            if (part := _part(rng, example, pieces)) is not None:
                yield part
        silent = [p for p in pieces if not any(p[0] < end and begin < p[1] for begin, end in example.spans)]
        if len(silent) > 1:
            yield Example(example.question, "".join(example.document[slice(*piece)] for piece in silent), ())


def _pieces(document: str) -> list[Span]:
    cuts = [0, *(found.end() for found in _PIECE.finditer(document)), len(document)]
    return [(begin, end) for begin, end in pairwise(cuts) if end > begin]


def _part(rng: random.Random, example: Example, pieces: Sequence[Span]) -> Example | None:
    span = rng.choice(example.spans)
    at = next(i for i, (begin, end) in enumerate(pieces) if begin <= span[0] < end)
    first, last = rng.randint(0, at), rng.randint(at, len(pieces) - 1)
    begin, end = pieces[first][0], pieces[last][1]
    title = example.document[slice(*pieces[0])] if first and rng.random() < _TITLED else ""
    moved = len(title) - begin
    spans = tuple((a + moved, b + moved) for a, b in example.spans if begin <= a and b <= end)
    return Example(example.question, title + example.document[begin:end], spans) if spans else None
