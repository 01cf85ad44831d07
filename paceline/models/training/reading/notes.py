"""Generated notes as people keep them: lines, lists and sentences with prices, dates, times, codes, names and places.

Each relation has its wordings in a document and its questions, which share as few words as they may: a reader must not
learn that an answer stands beside the question's words. Names and values are drawn by `texts.names`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from paceline.models.training.reading.examples import Example, occurrences
from paceline.models.training.texts import names, phrases
from paceline.models.training.texts.names import choices, words

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
    return rng.choice((f"{rng.choice(_FIRST)} {last}", f"{rng.choice(_FIRST)}", f"Mr {last}", f"Mrs {last}", f"Dr {last}"))


def _price(rng: random.Random) -> str:
    whole = rng.choice((rng.randint(2, 40), rng.randint(40, 900), rng.randint(9, 60) * 100))
    cents = rng.choice(("", "", f".{rng.randint(1, 19) * 5:02d}"))
    return rng.choice((f"£{whole}{cents}", f"{whole}{cents} euros", f"${whole}{cents}", f"{whole}{cents} EUR", f"€{whole}{cents}"))


def _date(rng: random.Random) -> str:
    day, month = rng.randint(1, 28), rng.choice(_MONTHS)
    return rng.choice((f"{day} {month}", f"{month} {day}", f"{rng.choice(_DAYS)} {day} {month}",
                       f"{day} {month} {rng.randint(2019, 2029)}", f"{day}.{rng.randint(1, 12)}.{rng.randint(2020, 2028)}",
                       f"{rng.choice(_DAYS)}"))  # fmt: skip


def _time(rng: random.Random) -> str:
    hour, minute = rng.randint(6, 22), rng.choice(("00", "15", "30", "45"))
    half = "am" if hour < 12 else "pm"
    return rng.choice((f"{hour}:{minute}", f"{(hour - 1) % 12 + 1} {half}", f"{(hour - 1) % 12 + 1}:{minute} {half}",
                       f"{hour}.{minute}", f"{hour} o'clock" if hour < 13 else f"{hour}:{minute}"))  # fmt: skip


def _phone(rng: random.Random) -> str:
    parts = [str(rng.randint(100, 999)), str(rng.randint(1000, 9999))]
    return rng.choice((f"0{rng.randint(11, 99)} {' '.join(parts)}", "-".join(parts), f"555-{parts[1]}", f"+44 {' '.join(parts)}"))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices("ABCDEFGHKLMNPRSTUVXYZ", k=2))
    return rng.choice((str(rng.randint(1000, 9999)), f"{letters}-{rng.randint(100, 9999)}", f"{rng.randint(10, 999)}{letters}",
                       f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}-{rng.randint(2, 99)}",
                       f"{rng.choice(_ADJECTIVES).title()}{rng.choice(_NOUNS).title()}{rng.randint(1, 99)}"))  # fmt: skip


def _amount(rng: random.Random) -> str:
    unit = words("g ml kg litres metres cm km mg tablets cups bags hours minutes days weeks pages seats")
    return f"{rng.choice((rng.randint(2, 12), rng.randint(10, 60), rng.randint(1, 19) * 50))} {rng.choice(unit)}"


def _duration(rng: random.Random) -> str:
    return f"{rng.randint(2, 50)} {rng.choice(words('minutes hours days weeks months years'))}"


def _count(rng: random.Random) -> str:
    return str(rng.choice((rng.randint(2, 20), rng.randint(20, 400))))


def _place(rng: random.Random) -> str:
    word = names.place_word(rng, "train")
    return rng.choice((word, f"{rng.randint(1, 180)} {word} Road", f"the {word} Inn", f"{word} station", f"Room {rng.randint(1, 40)}",
                       f"Hall {rng.choice('ABCDEF')}", f"{rng.choice(_SPOTS)}"))  # fmt: skip


def _make(rng: random.Random) -> str:
    return f"{rng.choice(_MAKES)} {rng.choice('ABCDEGHKLMSTX')}{rng.randint(10, 9000)}"


def _codename(rng: random.Random) -> str:
    return f"{rng.choice(_ADJECTIVES).title()} {rng.choice(_NOUNS).title()}"


Draw = Callable[[random.Random], str]
_THINGS: Final = choices(
    "boiler|dentist|piano lesson|allotment|book club|choir|football club|rental car|dishwasher|campsite|choir trip|"
    "school fair|bakery|printer|router|greenhouse|vet|garage|insurance|summer camp|workshop|rowing club|sailing course|"
    "flat|office|server room|cellar|bike|caravan|wedding cake|guest room|pottery class|night bus|pharmacy|swimming pool|"
    "chess evening|film night|storage unit|newsletter|yoga class|heating oil|bouncy castle|orchard|museum|market stall|"
    "lease|gym|cattery|nursery|band room|boat|train to the coast|cooking course|flea market|first aid course|roof"
)


@dataclass(frozen=True, slots=True)
class _Relation:
    draw: Draw
    label: str
    states: tuple[str, ...]
    asks: tuple[str, ...]


def _relation(draw: Draw, label: str, states: str, asks: str) -> _Relation:
    return _Relation(draw, label, choices(states), choices(asks))


_RELATIONS: Final = (
    _relation(_price, "price", "the {t} costs {v}|we paid {v} for the {t}|{v} for the {t}|they want {v} for the {t} this year|the {t} came to {v} in all",
              "how much is the {t}?|what does the {t} cost?|what did we pay for the {t}?|what is the price of the {t}?|how expensive was the {t}?"),
    _relation(_price, "deposit", "a deposit of {v} is due for the {t}|{v} deposit paid for the {t}|leave {v} as a security for the {t}",
              "how much is the deposit for the {t}?|what deposit does the {t} need?|how much money do I leave as a deposit for the {t}?"),
    _relation(_price, "monthly fee", "the {t} is {v} a month|every month {v} goes to the {t}|{v} per month for the {t}",
              "what is the monthly fee of the {t}?|how much does the {t} cost per month?|what do we pay for the {t} each month?"),
    _relation(_price, "fine", "whoever is late for the {t} pays {v}|the penalty at the {t} is {v}",
              "what is the fine at the {t}?|how much do you pay when you are late for the {t}?"),
    _relation(_date, "date", "the {t} is on {v}|the {t} takes place {v}|{v}: {t}|put {v} in the diary for the {t}|the {t} starts on {v}",
              "when is the {t}?|what day is the {t}?|on which date is the {t}?|what is the date of the {t}?"),
    _relation(_date, "deadline", "everything for the {t} must be in by {v}|sign up for the {t} until {v}|last day to register for the {t} is {v}",
              "what is the deadline for the {t}?|by when do I have to sign up for the {t}?|until when can I register for the {t}?"),
    _relation(_date, "renewal", "the {t} runs out on {v}|the {t} contract ends {v}|the {t} has to be renewed on {v}",
              "when does the {t} expire?|when do I have to renew the {t}?|when does the contract for the {t} end?"),
    _relation(_date, "last service", "the {t} was last serviced on {v}|last inspection of the {t}: {v}|someone looked at the {t} on {v}",
              "when was the {t} last serviced?|when was the {t} checked last?|what was the date of the last inspection of the {t}?"),
    _relation(_time, "start", "the {t} begins at {v}|be at the {t} by {v}|we meet for the {t} at {v}|doors of the {t} open at {v}|the {t} opens at {v}",
              "what time does the {t} start?|at what time is the {t}?|when should I be at the {t}?|when does the {t} open?|from what time is the {t} open?"),
    _relation(_time, "end", "the {t} shuts at {v}|the {t} is over at {v}|last entry to the {t} is {v}|pick the children up from the {t} at {v}",
              "when does the {t} close?|what time does the {t} end?|until when is the {t} open?|when is the {t} finished?"),
    _relation(_phone, "phone", "ring {v} about the {t}|the {t} can be reached on {v}|call {v} if the {t} is shut|{t} tel. {v}",
              "what is the phone number of the {t}?|which number do I call about the {t}?|how can I reach the {t}?|what number should I ring for the {t}?"),
    _relation(_code, "code", "the {t} opens with {v}|type {v} at the door of the {t}|{v} is the combination for the {t}|the PIN of the {t} is {v}",
              "what is the code for the {t}?|what is the PIN of the {t}?|what do I type to open the {t}?|which combination opens the {t}?"),
    _relation(_code, "password", "log in to the {t} with {v}|the password for the {t} is {v}|{t} login: {v}",
              "what is the password for the {t}?|how do I log in to the {t}?|which password does the {t} use?"),
    _relation(_code, "reference", "quote {v} when you write to the {t}|our customer number at the {t} is {v}|the {t} knows us as {v}|booking {v} for the {t}",
              "what is our reference number with the {t}?|what is the customer number for the {t}?|what is the booking number of the {t}?|which number do I quote to the {t}?"),
    _relation(_person, "contact", "ask {v} about the {t}|{v} looks after the {t}|{v} is in charge of the {t}|the {t} is run by {v}|{v} organises the {t}",
              "who runs the {t}?|who is responsible for the {t}?|who do I ask about the {t}?|who is in charge of the {t}?|who organises the {t}?|who looks after the {t}?"),
    _relation(_person, "key holder", "{v} has the spare key of the {t}|the key to the {t} is with {v}|we gave {v} the key for the {t}",
              "who has the key to the {t}?|who keeps the spare key of the {t}?|where did the key for the {t} go?"),
    _relation(_person, "teacher", "{v} teaches at the {t}|the {t} is taught by {v}|our instructor for the {t} is {v}",
              "who teaches the {t}?|who is the instructor of the {t}?|what is the name of the teacher of the {t}?"),
    _relation(_person, "repaired by", "{v} repaired the {t}|the {t} was fixed by {v}|{v} came and mended the {t}",
              "who repaired the {t}?|who fixed the {t}?|which person mended the {t}?"),
    _relation(_place, "place", "the {t} is held at {v}|the {t} has moved to {v}|you find the {t} at {v}|the {t} takes place in {v}",
              "where is the {t}?|where does the {t} take place?|what is the address of the {t}?|where do we go for the {t}?|where can I find the {t}?"),
    _relation(lambda rng: rng.choice(_SPOTS), "kept", "the manual of the {t} is {v}|the papers for the {t} are {v}|spare parts for the {t} are kept {v}",
              "where is the manual of the {t}?|where are the papers for the {t}?|where do we keep the parts for the {t}?"),
    _relation(_amount, "amount", "take {v} to the {t}|the {t} needs {v}|order {v} for the {t}|the {t} holds {v}",
              "how much does the {t} need?|how much do we order for the {t}?|how much should I take to the {t}?|what quantity does the {t} hold?"),
    _relation(_duration, "lasts", "the {t} lasts {v}|allow {v} for the {t}|the {t} is valid for {v}|it takes {v} to get to the {t}",
              "how long does the {t} last?|how long is the {t}?|how much time do I need for the {t}?|for how long is the {t} valid?|how long does it take to the {t}?"),
    _relation(_duration, "notice", "cancel the {t} at least {v} ahead|the notice period of the {t} is {v}|{v} of warranty on the {t}",
              "what is the notice period of the {t}?|how far ahead must the {t} be cancelled?|how long is the warranty on the {t}?"),
    _relation(_count, "people", "{v} people come to the {t}|the {t} has room for {v}|{v} of us signed up for the {t}|at most {v} guests at the {t}",
              "how many people come to the {t}?|how many guests can the {t} take?|how many signed up for the {t}?|what is the maximum number at the {t}?"),
    _relation(_make, "model", "the {t} has a new {v}|we bought a {v} for the {t}|the machine in the {t} is a {v}",
              "which model is in the {t}?|what machine does the {t} have?|what did we buy for the {t}?|what make is the one in the {t}?"),
    _relation(lambda rng: rng.choice(_COLOURS), "colour", "the {t} is painted {v}|we chose {v} for the {t}|the door of the {t} is {v}",
              "what colour is the {t}?|which colour did we choose for the {t}?|how is the {t} painted?"),
    _relation(lambda rng: rng.choice(_MATERIALS), "material", "the {t} is made of {v}|{v} was used for the {t}", "what is the {t} made of?|which material was used for the {t}?"),
    _relation(_codename, "code name", "internally the {t} is called {v}|the {t} goes by the name {v}|{v} is our code name for the {t}",
              "what is the code name of the {t}?|what is the {t} called internally?|what name does the {t} go by?"),
    _relation(lambda rng: rng.choice(_REASONS), "delayed because", "the {t} was put off because {v}|the {t} was cancelled because {v}",
              "why was the {t} cancelled?|why was the {t} put off?|what was the reason the {t} did not happen?"),
    _relation(lambda rng: rng.choice(_DAYS) + "s", "days off", "the {t} is shut on {v}|no {t} on {v}|the {t} rests {v}",
              "on which day is the {t} closed?|which day is there no {t}?|when is the {t} shut?"),
    _relation(_person, "from", "the {t} was a present from {v}|{v} gave us the {t}|we got the {t} from {v}", "who gave us the {t}?|from whom is the {t}?|who did the {t} come from?"),
    _relation(_person, "driver", "{v} drives us to the {t}|{v} brings the {t}|it is {v}'s turn to clean the {t}",
              "who drives to the {t}?|who brings the {t}?|whose turn is it for the {t}?"),
)  # fmt: skip
_OPENINGS: Final = choices("|||Remember: |NB: |Note to self: |Important: |Update: |PS: |From the letter: |As agreed, ")
_POSSESSIVES: Final = words("the my our")


def _line(rng: random.Random, relation: _Relation, thing: str, value: str, form: int) -> str:
    if form == 0:  # prose
        text = rng.choice(relation.states).format(t=thing, v=value)
        if rng.random() < 0.3:
            text = text.replace("the ", rng.choice(("our ", "my ")), 1)
        text = rng.choice(_OPENINGS) + text
        return text[0].upper() + text[1:] + "."
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
    (thing, label), (relation, value) = rng.choice(list(stated.items()))
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
    return text[0].upper() + text[1:] if rng.random() < 0.9 else text.rstrip("?")
