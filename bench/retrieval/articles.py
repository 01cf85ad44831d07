"""Articles, cut into passages of the device's and the cloud's corpus and windows of test text.

WikiText's file with a data folder, else a generated encyclopaedia. Articles are cut by token ids of the measured model,
so that windows and passages have the same length for every method. Knows no model.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.training.texts import phrases
from lab.training.texts.attributes import BY_KIND
from lab.training.texts.corpus import Fact, state
from lab.training.texts.entities import entity
from lab.training.texts.names import Split
from paceline.core.side import Side
from paceline.errors import ConfigError

Ids = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]

_TITLE = re.compile(r"^ = ([^=]+) = ?$")
_HEADING = re.compile(r"^ (?:= )+([^=]+?) (?:= ?)+$")
# Undo WikiText's tokenisation: join numbers and hyphens, attach punctuation as in print.
_PRINTED = (
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([,.;:!?%)\]}])"), r"\1"),
    (re.compile(r"([(\[{$£€]) "), r"\1"),
    (re.compile(r" (n?'(?:s|t|re|ve|m|ll|d))\b"), r"\1"),
    (re.compile(r'" ([^"\n]*?) "'), r'"\1"'),
    (re.compile(r" – "), "–"),
    (re.compile(r"<unk>"), "_"),  # one mark for a word that the set masks
)
_OTHER_PROSE = (  # other sets with paragraphs of Wikipedia: training text of a language model
    ("squad", "paragraphs.jsonl.gz"),
    ("nq_open", "passages.jsonl.gz"),
    ("2wikimultihopqa", "corpus.jsonl.gz"),
    ("hotpotqa", "hotpotqa.jsonl.gz"),
)


@dataclass(frozen=True, slots=True)
class Article:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A passage of one side's corpus."""

    side: Side
    article: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Window:
    """Test text, in no corpus."""

    article: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Shelves:
    """Two corpora and the test text. No token of an article is in two of them, or in one twice."""

    pieces: tuple[Piece, ...]
    windows: tuple[Window, ...]

    def of(self, side: Side) -> list[Piece]:
        return [piece for piece in self.pieces if piece.side == side]


def shelve(articles: Iterable[Sequence[int]], *, window: int, passage: int, every: int = 3) -> Shelves:
    """Cut articles (token ids) into stretches of `window` tokens; the middle one of each `every` is test text.

    The others are cut into passages of `passage` tokens, alternating between device and cloud. A last passage shorter
    than a quarter is dropped; an incomplete last stretch goes to the corpora.
    """
    pieces: list[Piece] = []
    windows: list[Window] = []
    for number, ids in enumerate(articles):
        turn = 0
        for index, start in enumerate(range(0, len(ids), window)):
            stretch = tuple(ids[start : start + window])
            if index % every == every // 2 and len(stretch) == window:
                windows.append(Window(number, stretch))
                continue
            for cut in range(0, len(stretch), passage):
                part = stretch[cut : cut + passage]
                if len(part) >= passage / 4:
                    side: Side = "cloud" if turn % 2 else "device"
                    pieces.append(Piece(side, number, part))
                    turn += 1
    return Shelves(tuple(pieces), tuple(windows))


def wikitext(data: Path) -> list[Article]:
    """Articles of the folder's WikiText-2 text. Raises ConfigError without it."""
    files = sorted((data / "wikitext2").glob("*.txt"))
    if not files:
        raise ConfigError(f"{data} has no wikitext2/*.txt: give another folder with --data, or none")
    articles: list[Article] = []
    for file in files:
        articles += parse_wikitext(file.read_text(encoding="utf-8"))
    return articles


def parse_wikitext(text: str) -> list[Article]:
    """Articles in order; their text begins with the title line. The set's tokenisation is undone."""
    parts: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        if title := _TITLE.match(line):
            parts.append((title[1], []))
        if parts and line.strip():
            heading = _HEADING.match(line)
            parts[-1][1].append(printed(heading[1] if heading else line.strip()))
    return [Article(printed(title), "\n".join(lines) + "\n") for title, lines in parts]


def printed(line: str) -> str:
    """A line of WikiText as in print, except masked words."""
    for pattern, replacement in _PRINTED:
        line = pattern.sub(replacement, line)
    return line


def other_prose(data: Path) -> list[Article]:
    """Paragraphs of other sets in the folder, joined by title. Missing sets are skipped."""
    texts: dict[str, dict[str, None]] = defaultdict(dict)  # by title, in order, each paragraph once
    for folder, name in _OTHER_PROSE:
        file = data / folder / name
        if not file.is_file():
            continue
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                for paragraph in record.get("context", (record,)):
                    texts[paragraph["title"]][paragraph["text"]] = None
    return [Article(title, f"{title}\n" + "\n".join(paragraphs) + "\n") for title, paragraphs in texts.items()]


# ---- the generated encyclopaedia -------------------------------------------------------------------------------------
SUBJECTS = 3  # per entry: about 27 facts, more than the 16 documents that are retrieved at most on a side


@dataclass(frozen=True, slots=True)
class Entry:
    """An article of the encyclopaedia: all facts of a few subjects, and a retelling of the facts in other words."""

    facts: tuple[tuple[Side, str], ...]  # a passage that states one fact, and the side that holds it
    retelling: str


def encyclopaedia(rng: random.Random, split: Split, count: int) -> Iterator[Entry]:
    """Entries on invented subjects. Half of an entry's facts go to the device, half to the cloud.

    A passage has one fact sentence among filler sentences; the retelling begins with the subjects' names.
    """
    for _ in range(count):
        subjects = [entity(rng, split) for _ in range(SUBJECTS)]
        facts = [
            Fact(subject, attribute, attribute.value(rng, split))
            for subject in subjects
            for attribute in BY_KIND[subject.kind]
        ]
        rng.shuffle(facts)
        sides: list[Side] = ["cloud" if i % 2 else "device" for i in range(len(facts))]
        passages = [" ".join(_among_fillers(rng, state(rng, fact, None))) for fact in facts]
        rng.shuffle(facts)
        opening = f"This page is about {', '.join(subject.said for subject in subjects)}."
        retelling = " ".join([opening, *(state(rng, fact, None) for fact in facts)])
        yield Entry(tuple(zip(sides, passages, strict=True)), retelling)


def _among_fillers(rng: random.Random, sentence: str) -> list[str]:
    sentences = rng.sample(phrases.FILLERS, 4)
    sentences.insert(rng.randrange(5), sentence)
    return sentences


def shelve_entries(entries: Iterable[Entry], encode: Encode, *, window: int, passage: int) -> Shelves:
    """Encode passages and retellings, each cut at its limit."""
    pieces: list[Piece] = []
    windows: list[Window] = []
    for number, entry in enumerate(entries):
        pieces += [Piece(side, number, tuple(encode(text)[:passage])) for side, text in entry.facts]
        windows.append(Window(number, tuple(encode(entry.retelling)[:window])))
    return Shelves(tuple(pieces), tuple(windows))
