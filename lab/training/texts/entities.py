"""Entities of the generated corpus: invented places, people, ships and things of one's own."""

import random
from dataclasses import dataclass
from typing import Final

from lab.training.texts import names
from lab.training.texts.names import Split, choices, words

KINDS: Final = ("place", "town", "person", "ship", "team", "event", "project", "thing", "contact")


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity by its name in a document (`said`), in a question (`asked`) and in an answer (`answered`)."""

    kind: str
    said: str
    asked: str
    answered: str
    pronoun: str


_PLACES = words("Library Cafe Museum Hotel School Bakery Cinema Pharmacy Garden Clinic Market Theatre Inn Gallery Bank")
_MODIFIERS = words("Harbour Old Royal North South East West Upper Lower Grand Little City Village Station Market River")
_RELATIVES = words("sister brother aunt uncle cousin friend neighbour daughter son mother father grandmother boss")
_CONTACTS = choices(
    "landlord|dentist|doctor|plumber|lawyer|accountant|piano teacher|driving instructor|hairdresser|electrician|"
    "gardener|babysitter|tax adviser|vet|bank adviser|downstairs neighbour|team leader|manager"
)
_THINGS = choices(
    "car|bike|boiler|laptop|garage|safe|alarm|front door|kitchen|sofa|cellar|boat|tent|piano|camera|coffee machine|"
    "garden shed|wardrobe|mailbox|suitcase|wifi|printer|caravan|desk"
)
_SHIPS = words("ship ferry boat barge yacht")
_TEAMS = words("Rovers United Wanderers Rowers Tigers Runners Skaters Choir Players Swimmers")
_EVENTS = words("Festival Fair Race Concert Regatta Congress Exhibition Ball Parade Workshop")
_OCCASIONS = choices("wedding|party|birthday dinner|graduation|housewarming|farewell party")


def _mine(rng: random.Random, kind: str, noun: str, pronoun: str) -> Entity:
    owner = rng.choice(("my", "our"))
    return Entity(kind, f"{owner} {noun}", f"{owner if rng.random() < 0.7 else 'my'} {noun}", f"your {noun}", pronoun)


def _either(rng: random.Random, kind: str, long: str, short: str, pronoun: str) -> Entity:
    asked = long if rng.random() < 0.6 else short
    return Entity(kind, long, asked, asked, pronoun)


def _event(rng: random.Random, split: Split) -> Entity:
    if rng.random() < 0.4:
        noun = f"{rng.choice(_RELATIVES)} {names.person_word(rng, split)}'s {rng.choice(_OCCASIONS)}"
        return _mine(rng, "event", noun, "it")
    long = f"the {names.place_word(rng, split)} {rng.choice(_EVENTS)}"
    return _either(rng, "event", long, long, "it")


def _place(rng: random.Random, split: Split) -> Entity:
    place, word = rng.choice(_PLACES), names.place_word(rng, split)
    if rng.random() < 0.5:
        long = f"the {rng.choice(_MODIFIERS)} {place} of {word}"
        return _either(rng, "place", long, long, "it")
    return _either(rng, "place", f"the {word} {place}", f"the {word} {place}", "it")


def _person(rng: random.Random, split: Split) -> Entity:
    if rng.random() < 0.3:
        word = names.person_word(rng, split)
        mine = _mine(rng, "person", f"{rng.choice(_RELATIVES)} {word}", rng.choice(("she", "he")))
        return mine if rng.random() < 0.6 else Entity("person", mine.said, word, word, mine.pronoun)
    name = names.full_name(rng, split)
    return _either(rng, "person", name, name, rng.choice(("she", "he")))


def entity(rng: random.Random, split: Split) -> Entity:
    """Draw one entity of any kind."""
    kind = rng.choices(KINDS, (5, 3, 4, 2, 2, 2.5, 1.5, 1.5, 1.5))[0]
    word = names.place_word(rng, split)
    if kind == "place":
        return _place(rng, split)
    if kind == "town":
        return _either(rng, "town", rng.choice((word, f"the {rng.choice(('town', 'village'))} of {word}")), word, "it")
    if kind == "person":
        return _person(rng, split)
    if kind == "ship":
        return _either(rng, "ship", f"the {rng.choice(_SHIPS)} {word}", f"the {word}", "it")
    if kind == "team":
        name = f"the {word} {rng.choice(_TEAMS)}"
        return _either(rng, "team", name, name, "it")
    if kind == "event":
        return _event(rng, split)
    if kind == "project":
        return _either(rng, "project", f"the project {word}", f"Project {word}", "it")
    if kind == "thing":
        return _mine(rng, "thing", rng.choice(_THINGS), "it")
    return _mine(rng, "contact", rng.choice(_CONTACTS), rng.choice(("she", "he")))
