"""Generated notes as people keep them: lines, lists and sentences with prices, dates, times, codes, names and places.

Each relation has its wordings in a document and its questions, which share as few words as they may: a reader must not
learn that an answer stands beside the question's words. Names and values are drawn by `texts.names`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.training.reading.examples import Example, occurrences
from lab.training.texts import names, phrases
from lab.training.texts.corpus import sentence
from lab.training.texts.names import choices, words

_MONTHS: Final = words("January February March April May June July August September October November December")
_DAYS: Final = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_FIRST: Final = words(
    "Anna Ben Clara David Emma Frank Grace Hugo Ines Jonas Karen Leo Maria Nils Olga Paul Rosa Sam Tina Viktor Yusuf "
    "Priya Chen Amara Diego Fatima Ivan Keiko Omar Lucia"
)
_ADJECTIVES: Final = words("red blue silver quiet golden tall broken northern little amber frozen green old swift")
_NOUNS: Final = words("lantern otter harbour maple comet anchor falcon bridge thistle copper river walnut button drum")
_MAKES: Final = words("Bosch Miele Siemens Lenovo Brother Epson Makita Karcher Philips Tefal Vaillant Worcester")
_COLOURS: Final = choices("dark green|white|navy blue|pale grey|off-white|bright yellow|black|brick red|light blue")
_SPOTS: Final = choices(
    "under the stairs|in the left drawer|behind the boiler|on the top shelf|in the blue folder|in the glove box|"
    "next to the fuse box|in the tin by the door|at the back of the shed|in the second cupboard|inside the old teapot"
)
_MATERIALS: Final = choices("oak|brass|wool|slate|linen|steel|bamboo|cork|leather|pine|ceramic|canvas")
_REASONS: Final = choices(
    "the roof leaked|the driver was ill|the part had not arrived|of the storm|the hall was double booked|"
    "the paint was still wet|the pump failed|nobody had a key|the road was closed|the results were late"
)


def _person(rng: random.Random) -> str:
    last = names.person_word(rng, "train")
    return rng.choice(
        (f"{rng.choice(_FIRST)} {last}", f"{rng.choice(_FIRST)}", f"Mr {last}", f"Mrs {last}", f"Dr {last}")
    )


def _price(rng: random.Random) -> str:
    whole = rng.choice((rng.randint(2, 40), rng.randint(40, 900), rng.randint(9, 60) * 100))
    cents = rng.choice(("", "", f".{rng.randint(1, 19) * 5:02d}"))
    return rng.choice(
        (f"£{whole}{cents}", f"{whole}{cents} euros", f"${whole}{cents}", f"{whole}{cents} EUR", f"€{whole}{cents}")
    )


def _date(rng: random.Random) -> str:
    day, month = rng.randint(1, 28), rng.choice(_MONTHS)
    return rng.choice(
        (
            f"{day} {month}",
            f"{month} {day}",
            f"{rng.choice(_DAYS)} {day} {month}",
            f"{day} {month} {rng.randint(2019, 2029)}",
            f"{day}.{rng.randint(1, 12)}.{rng.randint(2020, 2028)}",
            f"{rng.choice(_DAYS)}",
        )
    )


def _time(rng: random.Random) -> str:
    hour, minute = rng.randint(6, 22), rng.choice(("00", "15", "30", "45"))
    half = "am" if hour < 12 else "pm"
    return rng.choice(
        (
            f"{hour}:{minute}",
            f"{(hour - 1) % 12 + 1} {half}",
            f"{(hour - 1) % 12 + 1}:{minute} {half}",
            f"{hour}.{minute}",
            f"{hour} o'clock" if hour < 13 else f"{hour}:{minute}",
        )
    )


def _phone(rng: random.Random) -> str:
    parts = [str(rng.randint(100, 999)), str(rng.randint(1000, 9999))]
    return rng.choice(
        (f"0{rng.randint(11, 99)} {' '.join(parts)}", "-".join(parts), f"555-{parts[1]}", f"+44 {' '.join(parts)}")
    )


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTUVXYZ", k=2))
    return rng.choice(
        (
            str(rng.randint(1000, 9999)),
            f"{letters}-{rng.randint(100, 9999)}",
            f"{rng.randint(10, 999)}{letters}",
            f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}-{rng.randint(2, 99)}",
            f"{rng.choice(_ADJECTIVES).title()}{rng.choice(_NOUNS).title()}{rng.randint(1, 99)}",
        )
    )


def _amount(rng: random.Random) -> str:
    unit = words("g ml kg litres metres cm km mg tablets cups bags hours minutes days weeks pages seats")
    return f"{rng.choice((rng.randint(2, 12), rng.randint(10, 60), rng.randint(1, 19) * 50))} {rng.choice(unit)}"


def _duration(rng: random.Random) -> str:
    return f"{rng.randint(2, 50)} {rng.choice(words('minutes hours days weeks months years'))}"


def _count(rng: random.Random) -> str:
    return str(rng.choice((rng.randint(2, 20), rng.randint(20, 400))))


def _place(rng: random.Random) -> str:
    word = names.place_word(rng, "train")
    return rng.choice(
        (
            word,
            f"{rng.randint(1, 180)} {word} Road",
            f"the {word} Inn",
            f"{word} station",
            f"Room {rng.randint(1, 40)}",
            f"Hall {rng.choice('ABCDEF')}",
            f"{rng.choice(_SPOTS)}",
        )
    )


def _make(rng: random.Random) -> str:
    return f"{rng.choice(_MAKES)} {rng.choice('ABCDEGHKLMSTX')}{rng.randint(10, 9000)}"


def _codename(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES).title()} {rng.choice(_NOUNS).title()}"


Draw = Callable[[random.Random], str]
_THINGS: Final = choices(
    "boiler|dentist|piano lesson|allotment|book club|choir|football club|rental car|dishwasher|campsite|choir trip|"
    "school fair|bakery|printer|router|greenhouse|vet|garage|insurance|summer camp|workshop|rowing club|"
    "sailing course|flat|office|server room|cellar|bike|caravan|wedding cake|guest room|pottery class|night bus|"
    "pharmacy|swimming pool|"
    "chess evening|film night|storage unit|newsletter|yoga class|heating oil|bouncy castle|orchard|museum|market stall|"
    "lease|gym|cattery|nursery|band room|boat|train to the coast|cooking course|flea market|first aid course|roof"
)


KINDS: Final[dict[str, Draw]] = {
    "price": _price,
    "date": _date,
    "time": _time,
    "phone": _phone,
    "code": _code,
    "person": _person,
    "place": _place,
    "spot": lambda rng: rng.choice(_SPOTS),
    "amount": _amount,
    "duration": _duration,
    "count": _count,
    "make": _make,
    "colour": lambda rng: rng.choice(_COLOURS),
    "material": lambda rng: rng.choice(_MATERIALS),
    "codename": _codename,
    "reason": lambda rng: rng.choice(_REASONS),
    "days": lambda rng: rng.choice(_DAYS) + "s",
}


@dataclass(frozen=True, slots=True)
class _Relation:
    """A kind of value, and how it is stated of a thing {t} and asked for."""

    draw: Draw
    label: str  # of rivals the roles, of which a sentence gives two, {a} and {b}, their values {v} and {w}
    states: tuple[str, ...]
    asks: tuple[str, ...]  # of rivals for the value of {a}


def _read(name: str) -> tuple[_Relation, ...]:
    """Blocks of a kind of value and a label, then wordings; those with a `?` are questions."""
    found = []
    for block in Path(__file__).with_name(name).read_text("utf-8").split("\n\n"):
        head, *lines = block.strip().splitlines()
        kind, label = head.split(": ")
        texts = [line.strip() for line in lines]
        asks = tuple(text for text in texts if text.endswith("?"))
        found.append(_Relation(KINDS[kind], label, tuple(text for text in texts if text not in asks), asks))
    return tuple(found)


_RELATIONS: Final = _read("relations.txt")
_RIVALS: Final = _read("rivals.txt")
_OPENINGS: Final = choices("|||Remember: |NB: |Note to self: |Important: |Update: |PS: |From the letter: |As agreed, ")
_POSSESSIVES: Final = words("the my our")


def _line(rng: random.Random, relation: _Relation, thing: str, value: str, form: int) -> str:
    if form == 0:  # prose
        text = rng.choice(relation.states).format(t=thing, v=value)
        if rng.random() < 0.3:
            text = text.replace("the ", rng.choice(("our ", "my ")), 1)
        text = rng.choice(_OPENINGS) + text
        return sentence(text) + "."
    if form == 1:  # a list of labels
        return f"- {thing.capitalize()}, {relation.label}: {value}"
    if form == 2:
        return f"{thing.capitalize()} - {relation.label} {value}"
    return f"* {rng.choice(relation.states).format(t=thing, v=value)}"


def notes_example(rng: random.Random) -> Example:
    """A question about a few lines; some questions ask for what the lines do not say, some for two things."""
    things = rng.sample(_THINGS, rng.randint(1, 4))
    stated: dict[tuple[str, str], tuple[_Relation, str]] = {}
    for _ in range(rng.randint(2, 8)):
        thing, relation = rng.choice(things), rng.choice(_RELATIONS)
        if stated and rng.random() < 0.25:  # a rival: the same kind of value of another thing
            relation = rng.choice(list(stated.values()))[0]
        stated.setdefault((thing, relation.label), (relation, relation.draw(rng)))
    form = rng.choices((0, 1, 2, 3), (6, 2, 1, 1))[0]
    lines = [_line(rng, relation, thing, value, form) for (thing, _), (relation, value) in stated.items()]
    for _ in range(rng.randint(0, 3)):
        lines.insert(rng.randint(0, len(lines)), rng.choice(phrases.FILLERS))
    document = (" " if form == 0 and rng.random() < 0.8 else "\n").join(lines)
    if rng.random() < 0.5:
        document = f"# {rng.choice(things).capitalize()}\n\n{document}"
    (thing, _), (relation, value) = rng.choice(list(stated.items()))
    shape = rng.random()
    if shape < 0.72:
        return Example(_question(rng, relation, thing), document, occurrences(document, value))
    other = next(each for each in iter(lambda: rng.choice(_RELATIONS), None) if (thing, each.label) not in stated)
    stranger = next(each for each in iter(lambda: rng.choice(_THINGS), None) if each not in things)
    if shape < 0.86:  # what the lines lack: another property, or the same of another thing
        asked = _question(rng, other, thing) if rng.random() < 0.5 else _question(rng, relation, stranger)
        return Example(asked, document, ())
    lacking = _question(rng, rng.choice(_RELATIONS), stranger)
    pair = [_question(rng, relation, thing).rstrip("?"), lacking.rstrip("?")]
    rng.shuffle(pair)
    second = pair[1][0].lower() + pair[1][1:]
    return Example(f"{pair[0]} and {second}?", document, occurrences(document, value))


def _question(rng: random.Random, relation: _Relation, thing: str) -> str:
    text = rng.choice(relation.asks).format(t=thing)
    text = text.replace("the " + thing, f"{rng.choice(_POSSESSIVES)} {thing}")
    return sentence(text) if rng.random() < 0.9 else text.rstrip("?")


def rivals_example(rng: random.Random) -> Example:
    """A question about one of two values of the same kind in one sentence, among lines about other things; or about
    a third thing of that kind, which no line has."""
    rivals = rng.choice(_RIVALS)
    a, b, stranger = rng.sample(choices(rivals.label), 3)
    v = rivals.draw(rng)
    w = next(value for value in iter(lambda: rivals.draw(rng), None) if value not in v and v not in value)
    thing = rng.choice(_THINGS)
    asked = rng.choice(rivals.asks)
    if rng.random() < 0.5:
        state = rng.choice(rivals.states).format(a=a, b=b, v=v, w=w, t=thing)
    else:  # the one that is asked for is the second
        state = rng.choice(rivals.states).format(a=b, b=a, v=w, w=v, t=thing)
    stated = sentence(state) + "."
    lines = [stated]
    for _ in range(rng.randint(0, 4)):
        relation, other = rng.choice(_RELATIONS), rng.choice([each for each in _THINGS if each != thing])
        line = _line(rng, relation, other, relation.draw(rng), 0)
        lines.insert(rng.randint(0, len(lines)), line)
    document = rng.choice((" ", " ", "\n")).join(lines)
    is_known = rng.random() < 0.85
    question = sentence(asked.format(a=a if is_known else stranger, t=thing))
    if not is_known:
        return Example(question, document, ())
    begin = document.index(stated)
    spans = occurrences(document, v)
    return Example(question, document, tuple(span for span in spans if begin <= span[0] < begin + len(stated)))
