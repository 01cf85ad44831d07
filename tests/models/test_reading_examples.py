"""Questions of the reader's training that are made, not written: the answer stands where they say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lab.training.average import average
from lab.training.reading.clozes import cloze, sentences, values
from lab.training.reading.examples import Example
from lab.training.reading.notes import rivals_example
from lab.training.reading.sources import without_answer
from lab.training.reading.topics import topic_example

TEXT = (
    "The mill at Ostrey was built in 1820. It ground 40 tonnes of rye a week. The miller, Anna Vell, sold it for "
    "£2,500 on 3 March 1871. Since then the cellar has been used for cheese."
)


def test_sentences_and_their_values() -> None:
    split = sentences(TEXT)
    assert len(split) == 4 and " ".join(split) == TEXT
    found = [{value.kind: sentence[value.start : value.end] for value in values(sentence)} for sentence in split]
    assert found[0] == {"name": "Ostrey", "date": "1820", "phrase": "built"}
    assert found[1]["number"] == "40 tonnes"
    assert (found[2]["money"], found[2]["date"], found[2]["name"]) == ("£2,500", "3 March 1871", "Anna Vell")


def test_a_question_points_at_its_value_or_its_sentence_is_gone() -> None:
    rng = random.Random(1)
    texts = [sentences(TEXT)]
    known = {sentence[v.start : v.end] for sentence in texts[0] for v in values(sentence)}
    lacking = 0
    for _ in range(300):
        example = cloze(rng, texts)
        assert example.question.endswith("?")
        if not example.spans:
            lacking += 1
            assert len(sentences(example.document)) < len(texts[0])
            continue
        ((start, end),) = example.spans
        answer = example.document[start:end]
        assert answer in known and answer not in example.question.split()
    assert 20 < lacking < 80


def test_a_document_without_the_sentences_of_its_answer_does_not_answer() -> None:
    at = TEXT.index("1820")
    left = without_answer(Example("When was the mill built?", TEXT, ((at, at + 4),)))
    assert left.spans == () and "1820" not in left.document and "Anna Vell" in left.document
    whole = Example("When?", "Built in 1820.", ((9, 13),))
    assert without_answer(whole) == whole, "there must be a document"


def test_of_two_values_of_one_kind_the_one_that_is_asked_for_is_pointed_at() -> None:
    rng = random.Random(2)
    drawn = [rivals_example(rng) for _ in range(400)]
    known = [each for each in drawn if each.spans]
    assert 300 < len(known) < 380
    for example in known:
        assert all(start < end <= len(example.document) for start, end in example.spans)
        assert len({example.document[start:end] for start, end in example.spans}) == 1
    locks = [each for each in known if each.question == "What is the code for the alarm?"]
    for example in locks:
        start, _ = example.spans[0]
        assert "the alarm" in example.document[max(0, start - 90) : start + 60].lower()


def test_the_average_of_models_of_one_shape(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 6.0)):
        save_file({"heads": torch.full((2, 3), value, dtype=torch.float16)}, tmp_path / name)
    found = average([tmp_path / name for name in "abc"])
    assert torch.equal(found["heads"], torch.full((2, 3), 3.0, dtype=torch.float16))
    save_file({"heads": torch.ones((2, 4))}, tmp_path / "d")
    with pytest.raises(ValueError, match="same shape"):
        average([tmp_path / "a", tmp_path / "d"])


def test_notes_name_their_thing_at_the_top_and_the_answer_stands_below() -> None:
    rng = random.Random(3)
    answered = 0
    for _ in range(600):
        example = topic_example(rng)
        if not example.spans:
            continue
        answered += 1
        ((begin, end),) = example.spans
        answer, document = example.document[begin:end], example.document
        assert answer.strip() == answer != ""
        assert begin > min(at for mark in (". ", "\n") if (at := document.find(mark)) >= 0)
        assert not document[end : end + 1].isalnum() and not document[begin - 1].isalnum()
    assert 420 < answered < 540
