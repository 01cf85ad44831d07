"""Generated notes about one thing, named once at the top: what follows are fragments that leave it out.

So people write for themselves ("The mare. Livery is 210 a month. Wormed on 3 May."), and so questions do not ("What do
I pay each month to keep the mare?"): the words of the question stand beside the name at the top, not beside the answer.
The name is often followed by a value of its own, which answers nothing. Prices mostly lack a currency. Not handled:
facts that need two of the fragments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

from lab.training.reading.examples import Example
from lab.training.reading.notes import KINDS
from lab.training.texts import phrases
from lab.training.texts.corpus import sentence
from lab.training.texts.names import choices

Draw = Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class _Attribute:
    kind: str
    draw: Draw
    states: tuple[str, ...]  # without the name of the thing
    asks: tuple[str, ...]  # with it, where {n} stands


@dataclass(frozen=True, slots=True)
class _Topic:
    names: tuple[str, ...]
    attributes: tuple[_Attribute, ...]

    @property
    def naming(self) -> tuple[str, ...]:
        """The questions that say what they are about."""
        return tuple(ask for each in self.attributes for ask in each.asks if "{n}" in ask)


def _sum(rng: random.Random) -> str:
    """A price, mostly without a currency."""
    if rng.random() < 0.35:
        return KINDS["price"](rng)
    whole = rng.choice((rng.randint(2, 40), rng.randint(40, 990), rng.randint(1001, 9800)))
    return f"{whole:,}" if rng.random() < 0.6 else f"{whole}.{rng.randint(1, 19) * 5:02d}"


def _drawing(kind: str) -> Draw:
    if kind.startswith("["):
        known = tuple(kind.strip("[]").split(";"))
        return lambda rng: rng.choice(known)
    return _sum if kind == "sum" else KINDS[kind]


def _topics() -> tuple[_Topic, ...]:
    """Read `topics.txt`: blocks of names, then attributes, each a kind of value > wordings > questions."""
    found = []
    for block in Path(__file__).with_name("topics.txt").read_text("utf-8").strip().split("\n\n"):
        head, *lines = block.splitlines()
        attributes = []
        for line in lines:
            kind, states, asks = line.split(" > ")
            attributes.append(_Attribute(kind, _drawing(kind), tuple(states.split(" / ")), tuple(asks.split(" / "))))
        found.append(_Topic(choices(head.split(": ")[1]), tuple(attributes)))
    return tuple(found)


_TOPICS: Final = _topics()
_LEADS: Final = choices("{n}|{n}|Notes on {n}|{n}: what to know|About {n}|{n}, {v}|{n}, {v}|{n} ({v})|{n}, {v}, {w}")
_EXTRAS: Final = ("date", "colour", "person", "place", "amount", "make", "count", "days", "codename")
_RIVALS: Final = 0.35  # share of the other fragments with a value of the kind that is asked for, that stay
_LACKING: Final = 0.2  # share of questions that no fragment answers
_TWO: Final = 0.08  # share of questions for a second thing that no fragment has


def topic_example(rng: random.Random) -> Example:
    topic = rng.choice(_TOPICS)
    name = rng.choice(topic.names)
    asked = rng.choice(topic.attributes)
    others = [each for each in topic.attributes if each is not asked]
    others = [each for each in others if each.kind != asked.kind or rng.random() < _RIVALS]
    others = rng.sample(others, min(len(others), rng.randint(2, 6)))
    question = _asked(rng, asked.asks, name)
    shape = rng.random()
    if shape < _LACKING:
        if rng.random() < 0.5:  # the same thing, but no value of this kind
            others = [each for each in others if each.kind != asked.kind]
        else:  # a fragment of that kind, but of another thing
            stranger = rng.choice([each for each in _TOPICS if each is not topic and each.naming])
            asks = stranger.naming
            question = _asked(rng, asks, rng.choice(stranger.names))
        document, _ = _document(rng, name, others, None)
        return Example(question, document, ())
    document, span = _document(rng, name, others, asked)
    if shape < _LACKING + _TWO:
        stranger = rng.choice([each for each in _TOPICS if each is not topic])
        pair = [question, _asked(rng, rng.choice(stranger.attributes).asks, rng.choice(stranger.names))]
        rng.shuffle(pair)
        question = f"{pair[0].rstrip('?')}{rng.choice((' and', ', and'))} {pair[1][0].lower()}{pair[1][1:]}"
    return Example(question, document, (span,))


def _asked(rng: random.Random, asks: Sequence[str], name: str) -> str:
    return rng.choice(asks).format(n=name.split(",")[0])


def _document(
    rng: random.Random, name: str, others: list[_Attribute], asked: _Attribute | None
) -> tuple[str, tuple[int, int]]:
    """The text, and where in it the value stands that is asked for; (0, 0) if none is."""
    v, w = (KINDS[kind](rng) for kind in rng.sample(_EXTRAS, 2))
    lead = rng.choice(_LEADS).format(n=name, v=v, w=w)
    pieces: list[tuple[str, int, int]] = [(sentence(lead), 0, 0)]
    for attribute in [*others, *([asked] if asked else [])]:
        value = attribute.draw(rng)
        before, after = rng.choice(attribute.states).split("{v}")
        text, begin = sentence(f"{before}{value}{after}"), len(before)
        pieces.append((text, begin, begin + len(value)) if attribute is asked else (text, 0, 0))
    for _ in range(rng.randint(0, 2)):
        pieces.append((rng.choice(phrases.FILLERS).rstrip("."), 0, 0))
    body = pieces[1:]
    rng.shuffle(body)
    mark, end = rng.choices(((". ", "."), ("\n", ""), ("\n- ", "")), (8, 1, 1))[0]
    pieces = [pieces[0], *body]
    text = mark.join(piece for piece, _, _ in pieces) + end
    starts = [0, *accumulate(len(piece) + len(mark) for piece, _, _ in pieces)]
    places = [(at + begin, at + stop) for at, (_, begin, stop) in zip(starts, pieces, strict=False) if stop]
    return text, places[0] if places else (0, 0)
