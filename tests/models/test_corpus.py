"""The generated corpus: held-out names, sizes of the value spaces, facts stated in documents."""

import random

import pytest
from tokenizers import Tokenizer

from lab.training.batches import Weights, encode_all
from lab.training.texts import names
from lab.training.texts.attributes import ATTRIBUTES
from lab.training.texts.corpus import Conversation, converse, double, draw_facts, missing_fact, single, write_document
from lab.training.texts.phrases import NO_DOCUMENT_ANSWER, OUTSIDE_ANSWER
from paceline.models import DEVICE


def _conversations(count: int, split: names.Split = "train", seed: int = 0) -> list[Conversation]:
    rng = random.Random(seed)
    return [converse(rng, split) for _ in range(count)]


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("make", [names.person_word, names.place_word])
def test_a_name_is_drawn_from_its_own_side_only(make: object, split: names.Split) -> None:
    rng = random.Random(3)
    drawn = {make(rng, split) for _ in range(2000)}  # type: ignore[operator]
    assert all(names.split_of(name) == split for name in drawn)
    assert len(drawn) > 1500  # a large space: names hardly ever repeat


def test_no_training_document_holds_a_held_out_name() -> None:
    rng = random.Random(4)
    held_out = set()
    for _ in range(300):
        for fact in draw_facts(rng, "held_out", 4):
            words = fact.value.split() if fact.attribute.named else []
            held_out |= {word for word in words if word.isalpha() and names.split_of(word) == "held_out"}
    held_out -= {"Mr", "Mrs", "Ms", "Dr", "Professor", "Captain", "the", "Street", "Road", "Lane", "Square"}
    held_out -= {"Hall", "Barn", "Hotel", "Castle", "Garden", "Club"}
    text = " ".join((c.document or "") + " " + " ".join(t.answer for t in c.turns) for c in _conversations(800))
    words = set(text.replace(".", " ").replace(",", " ").split())
    assert len(held_out) > 200
    assert not held_out & words


@pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda a: a.noun.replace(" ", "-"))
def test_guessing_a_value_does_not_pay(attribute: object) -> None:
    rng = random.Random(5)
    values = [attribute.value(rng, "train") for _ in range(3000)]  # type: ignore[attr-defined]
    assert len(set(values)) >= 60
    assert max(values.count(value) for value in set(values)) / len(values) < 0.05


def test_a_document_states_all_its_facts_and_not_the_missing_one() -> None:
    rng = random.Random(6)
    for _ in range(500):
        facts = draw_facts(rng, "train", rng.randint(1, 8))
        document = write_document(rng, "train", facts, 0.4)
        assert len({fact.key for fact in facts}) == len(facts)
        assert all(fact.value.lower() in document.lower() for fact in facts)
        missing = missing_fact(rng, "train", facts)
        assert missing.key not in {fact.key for fact in facts}
        asked = single(rng, missing, False)
        assert missing.value in asked.answer and asked.missing == (missing.value,)


def test_an_answer_holds_its_values_and_the_document_those_not_called_missing() -> None:
    for conversation in _conversations(1000, seed=7):
        for turn in conversation.turns:
            if conversation.document is None:
                assert turn.answer in (NO_DOCUMENT_ANSWER, OUTSIDE_ANSWER)
            elif turn.values:
                assert all(value in turn.answer for value in (*turn.values, *turn.missing))
                document = conversation.document.lower()
                assert all(value.lower() in document for value in turn.values if value not in turn.missing)
            else:
                assert turn.answer == OUTSIDE_ANSWER


def test_one_seed_one_corpus() -> None:
    assert _conversations(50, seed=8) == _conversations(50, seed=8)
    assert _conversations(50, seed=8) != _conversations(50, seed=9)


def test_a_value_that_the_document_lacks_hardly_counts_and_the_words_around_it_do() -> None:
    tokenizer = Tokenizer.from_file(str(DEVICE / "tokenizer.json"))
    rng = random.Random(3)
    facts = draw_facts(rng, "train", 4)
    lacking = missing_fact(rng, "train", facts)
    turn = double(rng, [facts[0], lacking], [lacking])
    (example,) = encode_all(tokenizer, [Conversation("Nothing.", [turn])], Weights(prompt=0.02, missing=0.05))
    counted = {weight: "" for weight in (1.0, 0.05)}
    for token, weight in zip(example.ids, example.weights, strict=True):
        if weight in counted:
            counted[weight] += tokenizer.decode([token])
    assert lacking.value.replace(" ", "").lower() in counted[0.05].replace(" ", "").lower()
    assert facts[0].value.replace(" ", "") in counted[1.0].replace(" ", "")
    assert lacking.value not in counted[1.0]
