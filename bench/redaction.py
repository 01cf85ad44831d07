"""`paceline bench redaction`: what redaction by patterns hides of known entities, and what leaks.

Made texts in English and German: templates of `questions/redaction.json` with names of its lists and numbers drawn
here. The half `dev` may be looked at by who changes the patterns; the claims are on `test`, whose names and sentences
are others, and of whose given names none stands in the lexicon. An entity counts as hidden if no word of it is left
that has a capital or a digit, in texts without capitals no word; what is replaced and touches no entity is needless.
With `--data`, answers of SQuAD to questions for a person, a place, a time or a number, in their paragraphs: real texts,
marked by people; of those, answers with a capital or a digit.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.redaction import Redactor

from .bootstrap import Estimate, share_of
from .findings import claimed
from .report import Options, Report

NAME = "redaction"
SUMMARY = "names and numbers hidden from a stranger's endpoint, by kind, and what leaks"

SET: Final = Path(__file__).parent / "questions" / "redaction.json"
SEED: Final = 11
FEW, MANY = 4, 40  # texts of a template
PARAGRAPHS: Final = 2000
AIM: Final = 0.95
SLOT: Final = re.compile(r"\{(\w+)\}")
PLACEHOLDER: Final = re.compile(r"\[[A-Z]+_\d+\]")
WORD: Final = re.compile(r"[^\W_]+")
KINDS: Final = {  # of slots that are told of together
    **dict.fromkeys(("person", "first", "last"), "person"),
    **{name: name for name in ("city", "firm", "street", "email", "phone", "iban", "id", "date", "amount", "link")},
}
ASKED: Final = {  # how a question for an entity begins
    "person": re.compile(r"who(?:m|se)?\b", re.IGNORECASE),
    "place": re.compile(r"(?:where|(?:in )?(?:what|which) (?:city|town|state|province|region|river))\b", re.IGNORECASE),
    "date": re.compile(r"(?:when|on what (?:date|day))\b", re.IGNORECASE),
    "number": re.compile(r"how (?:many|much)\b", re.IGNORECASE),
}


@dataclass(frozen=True, slots=True)
class MadeText:
    text: str
    entities: tuple[tuple[int, int, str], ...]  # start, end, kind


@dataclass(frozen=True, slots=True)
class Judged:
    """An entity of a text. left: what can still be read of it."""

    kind: str
    value: str
    left: str
    text: str


def run(options: Options) -> Report:
    content = json.loads(SET.read_text("utf-8"))
    rows: list[dict[str, object]] = []
    overall: dict[tuple[str, str], tuple[Estimate, Estimate]] = {}
    leaks: list[Judged] = []
    for half in ("dev", "test"):
        for language in ("en", "de"):
            texts = made(content[half], language, FEW if options.quick else MANY)
            judged, needed = judge(texts)
            recalled = list(recall_rows(judged, f"made {half} {language}"))
            rows += recalled if half == "test" else [row for row in recalled if str(row["kind"]).startswith("all")]
            overall[half, language] = share_of([not each.left for each in judged]), share_of(needed)
            found = overall[half, language][1]
            row: dict[str, object] = {
                "texts": f"made {half} {language}",
                "kind": "replaced with need",
                "n": len(needed),
            }
            rows.append(row | {"hidden": round(found.value, 3), "interval_90": found.interval})
            leaks += [each for each in judged if each.left and half == "test"]
    if options.data is not None:
        judged, _ = judge(squad(options.data, PARAGRAPHS // (20 if options.quick else 1)))
        rows += recall_rows(judged, "SQuAD")
        rows += leak_rows([each for each in judged if each.left], "SQuAD")
    rows += leak_rows(leaks, "made test")
    claims = [
        claimed(f"redaction.{name}_{language}", overall["test", language][at], aim, "higher")
        for language in ("en", "de")
        for at, (name, aim) in enumerate((("hidden", AIM), ("needed", None)))
    ]
    return Report(NAME, {"seed": SEED, "interval_90": "resampled entities", "quick": options.quick}, rows, claims)


# ---- texts ----------------------------------------------------------------------------------------------------------
def made(half: Mapping[str, Any], language: str, count: int) -> list[MadeText]:
    rng = random.Random(SEED)
    texts = []
    for template in half[language]:
        for _ in range(count):
            parts, entities, at = [], [], 0
            plain = template.removeprefix("~")
            for slot in SLOT.finditer(plain):
                value = drawn(rng, slot[1], half, language)
                parts += [plain[at : slot.start()], value]
                start = sum(map(len, parts)) - len(value)
                entities.append((start, start + len(value), KINDS[slot[1]]))
                at = slot.end()
            text = "".join([*parts, plain[at:]])
            texts.append(MadeText(text.lower() if template != plain else text, tuple(entities)))
    return texts


def drawn(rng: random.Random, slot: str, names: Mapping[str, Sequence[str]], language: str) -> str:
    """A value of a slot, in one of the forms that people write."""

    def number(digits: int) -> str:
        return "".join(str(rng.randint(0, 9)) for _ in range(digits))

    first, last = rng.choice(names["first"]), rng.choice(names["last"])
    house = rng.randint(1, 189)
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2025)
    word = MONTHS[language][month - 1]
    euros, cents = rng.randint(12, 48_000), number(2)
    plain = re.sub(r"\W", "", f"{first}{last}").lower()
    dates = {
        "en": (f"{word} {day}, {year}", f"{day} {word} {year}", f"{month}/{day}/{year}", f"{day}th of {word}"),
        "de": (f"{day}. {word} {year}", f"{day:02}.{month:02}.{year}", f"{day}.{month}.", f"{day}. {word}"),
    }
    amounts = {
        "en": (f"${euros:,}", f"£{euros}.{cents}", f"{euros} dollars", f"€{euros:,}.{cents}"),
        "de": (f"{euros} Euro", f"{euros:,} €".replace(",", "."), f"{euros},{cents} EUR", f"{euros},- Euro"),
    }
    phones = {
        "en": (
            f"+44 20 {number(4)} {number(4)}",
            f"({number(3)}) {number(3)}-{number(4)}",
            f"07{number(3)} {number(6)}",
        ),
        "de": (
            f"0{rng.randint(150, 179)} {number(7)}",
            f"+49 {rng.randint(20, 99)} {number(7)}",
            f"0{number(3)}/{number(6)}",
        ),
    }
    street = {"en": f"{house} {rng.choice(names['street_en'])}", "de": f"{rng.choice(names['street_de'])} {house}"}
    values = {
        "first": (first,),
        "last": (last,),
        "person": (f"{first} {last}",),
        "city": names["city"],
        "firm": names["firm"],
        "street": (street[language],),
        "email": (f"{plain}@example.org", f"{first[0].lower()}.{plain}{house}@mail.example.com"),
        "phone": phones[language],
        "iban": (f"DE{number(2)} {number(4)} {number(4)} {number(4)} {number(4)} {number(2)}", f"DE{number(20)}"),
        "id": (
            f"{number(8)}",
            f"{chr(65 + month)}{number(3)}-{number(4)}",
            f"KD{number(6)}",
            f"C{number(2)}X{number(5)}",
        ),
        "date": dates[language],
        "amount": amounts[language],
        "link": (f"https://example.com/u/{plain}", f"www.{plain}.example.org"),
    }
    return rng.choice(values[slot])


MONTHS: Final = {
    "en": (
        *("January", "February", "March", "April", "May", "June", "July"),
        *("August", "September", "October", "November", "December"),
    ),
    "de": (
        *("Januar", "Februar", "März", "April", "Mai", "Juni", "Juli"),
        *("August", "September", "Oktober", "November", "Dezember"),
    ),
}


def squad(folder: Path, count: int) -> list[MadeText]:
    """Paragraphs with the answers to questions that ask for an entity."""
    with gzip.open(folder / "squad" / "questions.jsonl.gz", "rt", encoding="utf-8") as lines:
        asked = [json.loads(line) for line in lines]
    with gzip.open(folder / "squad" / "paragraphs.jsonl.gz", "rt", encoding="utf-8") as lines:
        paragraphs = {each["pid"]: each["text"] for each in map(json.loads, lines)}
    found: dict[str, dict[tuple[int, int], str]] = {}
    for each in asked:
        kind = next((kind for kind, begins in ASKED.items() if begins.match(each["question"])), None)
        text = paragraphs[each["pid"]]
        for answer in each["answers"][:1] if kind is not None else ():
            at = text.find(answer)
            if at >= 0 and kind is not None and not answer.islower():
                found.setdefault(each["pid"], {})[at, at + len(answer)] = kind
    chosen = random.Random(SEED).sample(sorted(found), min(count, len(found)))
    return [
        MadeText(paragraphs[key], tuple((*span, kind) for span, kind in sorted(found[key].items()))) for key in chosen
    ]


# ---- judgement ------------------------------------------------------------------------------------------------------
def judge(texts: Sequence[MadeText]) -> tuple[list[Judged], list[bool]]:
    """Every entity, and of each part that was replaced whether it touches one."""
    judged, needed = [], []
    for made_text in texts:
        text = made_text.text
        hidden = list(replaced(text))
        for start, end, kind in made_text.entities:
            words = [word for word in WORD.finditer(text, start, end) if text.islower() or not word[0].islower()]
            left = [
                word[0] for word in words if not any(low <= word.start() and word.end() <= high for low, high in hidden)
            ]
            judged.append(Judged(kind, text[start:end], " ".join(left), text))
        needed += [any(start < high and low < end for start, end, _ in made_text.entities) for low, high in hidden]
    return judged, needed


def replaced(text: str) -> Iterator[tuple[int, int]]:
    """Parts of a text that are replaced, in the end: as who gets it sees it."""
    redactor = Redactor()
    redactor.learn(text)
    given, at, before = redactor.redact(text), 0, 0
    for found in PLACEHOLDER.finditer(given):
        at += found.start() - before
        value = redactor.restore(found[0])
        yield at, at + len(value)
        at, before = at + len(value), found.end()


def recall_rows(judged: Sequence[Judged], texts: str) -> Iterator[dict[str, object]]:
    plain = [each for each in judged if each.text.islower()]
    kinds = dict.fromkeys(each.kind for each in judged)
    groups: dict[str, Sequence[Judged]] = {kind: [each for each in judged if each.kind == kind] for kind in kinds}
    groups |= {"all": judged, **({"all without capitals": plain} if plain else {})}
    for kind, group in groups.items():
        hidden = [not each.left for each in group]
        share = share_of(hidden)
        row: dict[str, object] = {"texts": texts, "kind": kind, "n": len(hidden), "hidden": round(share.value, 3)}
        yield row | {"interval_90": share.interval}


def leak_rows(leaks: Sequence[Judged], texts: str, most: int = 30) -> Iterator[dict[str, object]]:
    """What was left of entities, the most frequent first."""
    counts = Counter((each.kind, each.left) for each in leaks)
    examples = {(each.kind, each.left): each.text for each in reversed(leaks)}
    for (kind, left), count in counts.most_common(most):
        around = " ".join(examples[kind, left].split())
        at = max(0, around.find(left) - 30)
        row: dict[str, object] = {"part": "leaks", "texts": texts, "kind": kind, "left": left, "n": count}
        yield row | {"as_in": around[at : at + 80]}
