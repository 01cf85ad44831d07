"""Examine the demo pair: `python -m lab.training.evaluate [--device DIR --cloud DIR] [--data DIR]
[--questions N]`.

Every entity and every invented name in the questions was kept out of training; every answer is written greedily by the
program's own strategies and engines and counts as right only if it is the expected answer, character by character.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lab.demo_pair import Pair
from lab.training.texts import phrases
from lab.training.texts.corpus import (
    Fact,
    Turn,
    double,
    draw_facts,
    missing_fact,
    single,
    write_document,
)
from lab.training.texts.squad import Squad, normal_form
from paceline.models import CLOUD, DEVICE
from paceline.rag.embedder import load_embedder
from paceline.strategies.base import Side

FILLER = 0.3


@dataclass(frozen=True, slots=True)
class Question:
    """A turn, and the document (or None) of the side that answers it, or of device and cloud in this order."""

    turn: Turn
    documents: tuple[str | None, ...]

    def by_side(self, side: Side) -> dict[Side, str | None]:
        """Documents by side; a single document is read by the model of `side`."""
        if len(self.documents) == 1:
            return {side: self.documents[0]}
        return {"device": self.documents[0], "cloud": self.documents[1]}


Draw = Callable[[random.Random], Question]


def _facts_and_document(rng: random.Random, count: tuple[int, int] = (1, 8)) -> tuple[list[Fact], str]:
    facts = draw_facts(rng, "held_out", rng.randint(*count))
    return facts, write_document(rng, "held_out", facts, FILLER)


def one_fact(rng: random.Random) -> Question:
    facts, document = _facts_and_document(rng)
    return Question(single(rng, rng.choice(facts), True), (document,))


def two_facts(rng: random.Random) -> Question:
    facts, document = _facts_and_document(rng, (2, 8))
    return Question(double(rng, rng.sample(facts, 2)), (document,))


def no_document(rng: random.Random) -> Question:
    facts, _ = _facts_and_document(rng)
    fact = rng.choice(facts)
    asked = single(rng, fact, False)
    return Question(Turn(asked.question, phrases.NO_DOCUMENT_ANSWER, asked.values), (None,))


def lacking(rng: random.Random) -> Question:
    """A fact that the document does not state: the right answer can only be guessed."""
    facts, document = _facts_and_document(rng)
    return Question(single(rng, missing_fact(rng, "held_out", facts), False), (document,))


def outside(rng: random.Random) -> Question:
    return Question(Turn(phrases.outside_question(rng), phrases.OUTSIDE_ANSWER), (None,))


def outside_with_document(rng: random.Random) -> Question:
    return Question(Turn(phrases.outside_question(rng), phrases.OUTSIDE_ANSWER), (_facts_and_document(rng)[1],))


def both_sides(rng: random.Random) -> Question:
    """Two facts, one in each side's document, asked for in random order."""
    (ours, private), (theirs, public) = _facts_and_document(rng, (1, 6)), _facts_and_document(rng, (1, 6))
    pair = [rng.choice(ours), rng.choice(theirs)]
    rng.shuffle(pair)
    return Question(double(rng, pair), (private, public))


def either_side(rng: random.Random) -> Question:
    """One fact, in the document of one side; the other side's document states other facts."""
    (ours, private), (theirs, public) = _facts_and_document(rng, (1, 6)), _facts_and_document(rng, (1, 6))
    return Question(single(rng, rng.choice(rng.choice((ours, theirs))), True), (private, public))


def examine(pair: Pair, side: Side, draw: Draw, count: int, seed: int = 7) -> float:
    """The share of exact answers; where the value cannot be known, the share of answers that contain it."""
    rng = random.Random(seed)
    right = 0
    for _ in range(count):
        question = draw(rng)
        given = pair.answer(question.turn.question, question.by_side(side))
        guess = draw in (no_document, lacking)
        right += all(v in given for v in question.turn.values) if guess else given == question.turn.answer
    return right / count


def squad_match(pair: Pair, side: Side, data: Path, count: int) -> float:
    """Exact match as defined by SQuAD, on questions of held-out titles, each with its cropped paragraph."""
    rng = random.Random(11)
    squad = Squad(data, "held_out")
    asked = rng.sample(squad.questions, min(count, len(squad.questions)))
    right = 0
    for text, record in asked:
        given = pair.answer(record["question"].strip(), {side: squad.crop_for(rng, text, record)})
        right += normal_form(given) in {normal_form(gold) for gold in record["answers"]}
    return right / len(asked)


def report(pair: Pair, data: Path | None, count: int) -> Iterator[tuple[str, str, float]]:
    """Rows of the table: (model, set of questions, share)."""
    sides: tuple[Side, Side] = ("device", "cloud")
    for side in sides:
        for draw in (one_fact, two_facts, no_document, lacking, outside, outside_with_document):
            yield side, draw.__name__, examine(pair, side, draw, count)
        if data is not None:
            yield side, "squad", squad_match(pair, side, data, count)
    for draw in (both_sides, either_side):
        yield "mixture", draw.__name__, examine(pair, "device", draw, count)
    searched = replace(pair, embedder=load_embedder("minilm"))
    for draw in (both_sides, either_side):
        yield "weighted", draw.__name__, examine(searched, "device", draw, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=Path, default=DEVICE)
    parser.add_argument("--cloud", type=Path, default=CLOUD)
    parser.add_argument("--data", type=Path, help="folder with squad/")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    rows = []
    for who, what, share in report(Pair.load(args.device, args.cloud, threads=1), args.data, args.questions):
        sys.stdout.write(f"{who:8} {what:22} n={args.questions:<5} {share:.3f}\n")
        sys.stdout.flush()
        rows.append({"model": who, "set": what, "n": args.questions, "share": round(share, 4)})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
