"""Invented names and random values: the parts of the generated corpus that a model cannot know in advance.

A name is held out of training by its own hash, not by a list, so that any process can compute its split.
Every value space has at least sixty values drawn almost uniformly: guessing must not pay.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Literal

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 0.1


def words(text: str) -> tuple[str, ...]:
    """A word list, written as one text to keep tables readable."""
    return tuple(text.split())


def choices(text: str) -> tuple[str, ...]:
    """A list of phrases, written as one text with bars between them."""
    return tuple(text.split("|"))


_ONSETS = words("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gl gr kl pl pr sh sk st str th tr wh qu")
_VOWELS = words("a e i o u a e i o ai ea ee io oa ou ie")
_CODAS = words("n r l s m t k d nd rn ll st ck rk lm ss x ng")
_PERSON_ENDS = words("a o e y an en in el is or ar ia ina ette ley son us ah ine ric")
_PLACE_ENDS = words("wick ford dale by ton mere holm stead wood field burgh port haven bury well more low ney")


def split_of(name: str) -> Split:
    """The split of a single-word name."""
    digest = hashlib.sha256(name.lower().encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32 else "train"


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.5 else "")


def _word(split: Split, make: Callable[[], str]) -> str:
    while True:
        word = make().capitalize()
        if 3 <= len(word) <= 12 and split_of(word) == split:
            return word


def person_word(rng: random.Random, split: Split) -> str:
    """One invented name for a person, such as 'Velda' or 'Strinley'."""

    def make() -> str:
        if rng.random() < 0.2:
            return rng.choice(_VOWELS[:9]) + rng.choice(_CODAS) + rng.choice(_PERSON_ENDS)
        return "".join(_syllable(rng) for _ in range(rng.choice((1, 1, 2)))) + rng.choice([*_PERSON_ENDS, ""])

    return _word(split, make)


def place_word(rng: random.Random, split: Split) -> str:
    """One invented name for a place, a ship or a team, such as 'Tarnwick'."""

    def make() -> str:
        end = rng.choice(_PLACE_ENDS) if rng.random() < 0.6 else _syllable(rng)
        return "".join(_syllable(rng) for _ in range(rng.choice((1, 1, 2)))) + end

    return _word(split, make)


def full_name(rng: random.Random, split: Split) -> str:
    """A person's name: one word, two words, or a title and a word."""
    shape = rng.random()
    if shape < 0.35:
        return person_word(rng, split)
    if shape < 0.75:
        return f"{person_word(rng, split)} {person_word(rng, split)}"
    return f"{rng.choice(('Mr', 'Mrs', 'Ms', 'Dr', 'Professor', 'Captain'))} {person_word(rng, split)}"


_SHADES = words("dark light pale bright deep dusty soft warm faded smoky glossy matt")
_HUES = words(
    "red blue green white black yellow brown grey teal violet orange pink purple silver gold cream amber crimson"
)
_ANIMALS = words(
    "otter fox badger heron owl wolf hare stag raven swan beaver lynx bear falcon seal crab toad goat ram eagle"
)
_FOODS = choices(
    "bean soup|fish pie|rye bread|fried rice|goat cheese|egg noodles|lentil stew|potato salad|roast duck|"
    "beef dumplings|onion tart|pea curry|crab cakes|corn pancakes|plum cake|chicken pasta"
)
_TASTES = words("lemon garlic honey mint pepper walnuts ginger mustard basil cream chilli apples thyme olives")
_TRADES = words(
    "baker nurse pilot plumber teacher painter lawyer farmer tailor driver dentist sailor miner potter weaver cook "
    "gardener builder singer dancer editor surveyor beekeeper carpenter locksmith librarian translator welder vet judge"
)
_MANNERS = words("night school town ship hospital court village army theatre factory museum railway")
_THINGS = words(
    "maple harbour lantern copper thistle river pebble marble feather anchor candle meadow violin saddle ribbon window "
    "pepper garden bucket helmet carpet mirror needle walnut"
)
_MONTHS = words("January February March April May June July August September October November December")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MATERIALS = words(
    "oak stone brick marble copper pine slate clay granite steel bamboo glass chalk cedar iron sandstone"
)
_GOODS = words("wool salt clocks bells lace paper boots soap rope wine tea spoons kites drums hats knives")


def minutes(rng: random.Random) -> str:
    """Minutes in steps of five, written as on a clock; empty at the full hour."""
    minute = rng.randrange(0, 60, 5)
    return f":{minute:02d}" if minute else ""


def morning(rng: random.Random) -> str:
    return f"{rng.randint(5, 11)}{minutes(rng)} in the morning"


def evening(rng: random.Random) -> str:
    return f"{rng.randint(4, 11)}{minutes(rng)} in the evening"


def colour(rng: random.Random) -> str:
    return f"{rng.choice(_SHADES)} {rng.choice(_HUES)}"


def animal(rng: random.Random) -> str:
    return f"{rng.choice(_HUES)} {rng.choice(_ANIMALS)}"


def dish(rng: random.Random) -> str:
    return f"{rng.choice(_FOODS)} with {rng.choice(_TASTES)}"


def trade(rng: random.Random) -> str:
    return f"{rng.choice(_MANNERS)} {rng.choice(_TRADES)}"


def codeword(rng: random.Random) -> str:
    return f"{rng.choice(_THINGS)} {rng.choice(_THINGS)}"


def date(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(_MONTHS)}"


def weekly(rng: random.Random) -> str:
    return f"{rng.choice(_DAYS)} at {rng.randint(1, 12)}{minutes(rng)}"


def material(rng: random.Random) -> str:
    return f"{rng.choice(_HUES)} {rng.choice(_MATERIALS)}"


def goods(rng: random.Random) -> str:
    return f"{rng.choice(_SHADES)} {rng.choice(_GOODS)}"


def year(rng: random.Random) -> str:
    return str(rng.randint(1400, 2020))


def price(rng: random.Random) -> str:
    return f"{rng.randint(2, 999)} euros"


def metres(rng: random.Random) -> str:
    return f"{rng.randint(11, 999)} metres"


def kilometres(rng: random.Random) -> str:
    return f"{rng.randint(11, 999)} kilometres"


def people(rng: random.Random) -> str:
    return f"{rng.randint(11, 999) * rng.choice((10, 100))} people"


def phone(rng: random.Random) -> str:
    return " ".join(f"{rng.randint(10, 99)}" for _ in range(rng.choice((2, 3))))


def code(rng: random.Random) -> str:
    return f"{rng.randint(1000, 9999)}"


def room(rng: random.Random) -> str:
    return f"room {rng.randint(10, 499)}"
