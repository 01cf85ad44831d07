"""The generated corpus: documents of invented facts, and conversations about them.

All randomness comes from a `random.Random` of the caller. Conversations are text; `batches.py` encodes them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lab.training.texts import phrases
from lab.training.texts.attributes import BY_KIND, Attribute
from lab.training.texts.entities import Entity, entity
from lab.training.texts.names import Split, choices, place_word

_ASKS = choices(
    "What is the {n} of {e}?|What is the {n} of {e}?|Tell me the {n} of {e}.|Do you know the {n} of {e}?|"
    "I need the {n} of {e}.|Could you tell me the {n} of {e}?|Please give me the {n} of {e}.|{e}: what is the {n}?"
)
_ASKS_TWO = choices(
    "What are the {n} of {e} and the {m} of {f}?|Tell me the {n} of {e} and the {m} of {f}.|"
    "What is the {n} of {e}, and what is the {m} of {f}?|I need the {n} of {e} and the {m} of {f}."
)
_STATES = ("the {n} of {e} is {v}.", "the {n} of {e} is {v}.", "for {e}, the {n} is {v}.", "{e}: the {n} is {v}.")


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: `entity` has `value` as its `attribute`."""

    entity: Entity
    attribute: Attribute
    value: str

    @property
    def key(self) -> tuple[str, str]:
        return self.entity.answered.lower(), self.attribute.noun

    @property
    def clause(self) -> str:
        return self.attribute.clause.format(e=self.entity.answered, v=self.value)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, its answer, the values that the answer must contain and those of them that the document lacks."""

    question: str
    answer: str
    values: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class Conversation:
    """A training example as text: turns, with or without a document and a system prompt of the user."""

    document: str | None
    turns: list[Turn] = field(default_factory=list)
    system: str | None = None


def draw_facts(rng: random.Random, split: Split, count: int, rivals: float = 0.3) -> list[Fact]:
    """Draw facts about a few entities; no entity has the same attribute twice.

    `rivals` is the share of facts that repeat another's attribute, which are the hardest to distinguish.
    """
    facts: dict[tuple[str, str], Fact] = {}
    current = entity(rng, split)
    while len(facts) < count:
        if rng.random() < 0.5:
            current = entity(rng, split)
        elif facts and rng.random() < 0.3:
            current = rng.choice(list(facts.values())).entity
        attribute = rng.choice(BY_KIND[current.kind])
        if facts and rng.random() < rivals:
            other = rng.choice(list(facts.values()))
            attribute = other.attribute if current.kind in other.attribute.kinds else attribute
        fact = Fact(current, attribute, attribute.value(rng, split))
        facts.setdefault(fact.key, fact)
    drawn = list(facts.values())
    if rng.random() < 0.5:
        rng.shuffle(drawn)
    return drawn


def state(rng: random.Random, fact: Fact, previous: Fact | None, backward: float = 0.0) -> str:
    """Write one sentence that states a fact; a pronoun may replace the entity of the sentence before.

    `backward` is the extra share of sentences that name the value before the entity, the hardest to read.
    """
    hard = [template for template in fact.attribute.statements if template.find("{v}") < template.find("{e}")]
    if hard and rng.random() < backward:
        template = rng.choice(hard)
    else:
        template = rng.choice(_STATES) if rng.random() < 0.25 else rng.choice(fact.attribute.statements)
    said = fact.entity.said
    if previous is not None and previous.entity == fact.entity and template.startswith("{e} ") and rng.random() < 0.4:
        said = fact.entity.pronoun
    text = template.format(n=fact.attribute.noun, e=said, v=fact.value)
    return rng.choice(phrases.LEADS) + text if rng.random() < 0.1 else sentence(text)


def _passage(rng: random.Random, split: Split, facts: list[Fact], filler: float, titled: float, backward: float) -> str:
    sentences: list[str] = []
    previous: Fact | None = None
    for fact in facts:
        if rng.random() < filler:
            sentences.append(rng.choice(phrases.FILLERS))
            previous = None
        sentences.append(state(rng, fact, previous, backward))
        previous = fact
    if rng.random() < filler:
        sentences.append(rng.choice(phrases.FILLERS))
    shape = rng.random()
    if shape < 0.1:
        text = "\n".join(f"- {s}" for s in sentences)
    elif shape < 0.2 and len(sentences) > 2:
        cut = rng.randrange(1, len(sentences))
        text = " ".join(sentences[:cut]) + rng.choice(("\n", "\n\n")) + " ".join(sentences[cut:])
    else:
        text = " ".join(sentences)
    if rng.random() < titled:
        title = rng.choice(phrases.TITLES).format(w=place_word(rng, split))
        title = sentence(facts[0].entity.said) if rng.random() < 0.4 else title
        text = rng.choice(("{t}\n", "# {t}\n", "# {t}\n\n", "{t}\n\n", "[1] {t}\n")).format(t=title) + text
    return text


def write_document(rng: random.Random, split: Split, facts: list[Fact], filler: float, backward: float = 0.0) -> str:
    """Write prose that states every fact once, with filler sentences, titles and paragraphs as in real files.

    A longer document may consist of several passages, each with a title, as a retriever joins its results.
    """
    if len(facts) < 4 or rng.random() < 0.65:
        return _passage(rng, split, facts, filler, 0.3, backward) + rng.choice(("", "", "\n"))
    cuts = [0, *sorted(rng.sample(range(1, len(facts)), rng.randint(1, min(3, len(facts) - 1)))), len(facts)]
    titled = rng.choice((0.0, 0.5, 1.0))
    passages = [_passage(rng, split, facts[a:b], filler, titled, backward) for a, b in pairwise(cuts)]
    return rng.choice(("\n", "\n\n", "\n\n")).join(passages) + rng.choice(("", "", "\n"))


def ask(rng: random.Random, fact: Fact) -> str:
    if rng.random() < 0.4:
        template = rng.choice(_ASKS).replace("{n}", fact.attribute.noun)
    else:
        template = rng.choice(fact.attribute.questions)
    text = sentence(template.format(e=fact.entity.asked))
    return text.rstrip(".?") if rng.random() < 0.05 else text


def ask_two(rng: random.Random, first: Fact, second: Fact) -> str:
    """Write one question for two facts, in the order given."""
    if rng.random() < 0.4:
        template = rng.choice(_ASKS_TWO)
        names = {"e": first.entity.asked, "f": second.entity.asked}
        return template.format(n=first.attribute.noun, m=second.attribute.noun, **names)
    one, two = (rng.choice(fact.attribute.questions).format(e=fact.entity.asked) for fact in (first, second))
    return sentence(one.rstrip("?")) + rng.choice((" and ", ", and ")) + two


def single(rng: random.Random, fact: Fact, known: bool) -> Turn:
    return Turn(ask(rng, fact), sentence(fact.clause) + ".", (fact.value,), () if known else (fact.value,))


def double(rng: random.Random, pair: Sequence[Fact], missing: Sequence[Fact] = ()) -> Turn:
    first, second = pair
    answer = f"{sentence(first.clause)}, and {second.clause}."
    values = tuple(fact.value for fact in missing)
    return Turn(ask_two(rng, first, second), answer, (first.value, second.value), values)


def missing_fact(rng: random.Random, split: Split, facts: list[Fact]) -> Fact:
    """Draw a fact that the document does not state, often one that is easy to mistake for a stated one."""
    keys = {fact.key for fact in facts}
    while True:
        like, shape = rng.choice(facts), rng.random()
        if shape < 0.4:  # the same attribute of an entity that is not in the document
            who = next(e for e in iter(lambda: entity(rng, split), None) if e.kind in like.attribute.kinds)
            what = like.attribute
        elif shape < 0.7:  # another attribute of an entity in the document
            who, what = like.entity, rng.choice(BY_KIND[like.entity.kind])
        else:
            who = entity(rng, split)
            what = rng.choice(BY_KIND[who.kind])
        fact = Fact(who, what, what.value(rng, split))
        if fact.key not in keys:
            return fact


def document_turn(rng: random.Random, split: Split, facts: list[Fact]) -> Turn:
    """Draw a question: mostly for a fact the document states, sometimes for two, for one it lacks, or off topic."""
    shape = rng.random()
    if shape < 0.62 or (shape < 0.72 and len(facts) < 2):
        return single(rng, rng.choice(facts), True)
    if shape < 0.72:
        return double(rng, rng.sample(facts, 2))
    if shape < 0.84:
        lacking = missing_fact(rng, split, facts)
        pair = [rng.choice(facts), lacking]
        rng.shuffle(pair)
        return double(rng, pair, [lacking])
    if shape < 0.86:
        pair = [missing_fact(rng, split, facts) for _ in range(2)]
        return double(rng, pair, pair)
    if shape < 0.97:
        return single(rng, missing_fact(rng, split, facts), False)
    return Turn(phrases.outside_question(rng), phrases.OUTSIDE_ANSWER)


def bare_turn(rng: random.Random, split: Split) -> Turn:
    """Draw a question without any document."""
    if rng.random() < 0.5:
        return Turn(phrases.outside_question(rng), phrases.OUTSIDE_ANSWER)
    facts = draw_facts(rng, split, 2)
    turn = single(rng, facts[0], False) if rng.random() < 0.7 else double(rng, facts, facts)
    return Turn(turn.question, phrases.NO_DOCUMENT_ANSWER)


def converse(
    rng: random.Random,
    split: Split,
    max_facts: int = 8,
    max_turns: int = 4,
    filler: float = 0.3,
    backward: float = 0.0,
    rivals: float = 0.3,
) -> Conversation:
    """Draw one conversation, in which no answer occurs twice."""
    system = rng.choice(phrases.SYSTEM_PROMPTS) if rng.random() < 0.06 else None
    if rng.random() < 0.05:
        return Conversation(None, [bare_turn(rng, split)], system)
    count = rng.randint(1, max_facts) + (rng.randint(1, 6) if rng.random() < 0.1 and max_facts >= 8 else 0)
    facts = draw_facts(rng, split, count, rivals)
    conversation = Conversation(write_document(rng, split, facts, filler * rng.random() * 2, backward), [], system)
    most = min(max_turns, len(facts) + 1)
    for _ in range(rng.randint((most + 1) // 2, most)):
        turn = document_turn(rng, split, facts)
        if all(turn.answer != earlier.answer for earlier in conversation.turns):
            conversation.turns.append(turn)
    return conversation
