"""Questions of the reader's training that are made, not written: the answer stands where they say."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lab.training.average import average
from lab.training.reading.clozes import cloze, sentences, values
from lab.training.reading.examples import Encoded, Encodings, Example
from lab.training.reading.folders import Folder, Question, asked, folders, varied
from lab.training.reading.notes import rivals_example
from lab.training.reading.sources import without_answer
from lab.training.reading.topics import topic_example
from lab.training.reading.train import Batch, drawn, loss_of, shared_loss
from paceline.rag.embedder import load_embedder

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


SHED = Folder(
    "shed",
    {
        "keys.txt": "Keys\n\nThe shed: on the nail behind the water butt.\nThe gate: with Ines at number 9.\n" * 2,
        "mowers.csv": "machine,bought,price\nmower,2021-04-02,240\ntrimmer,2023-05-09,95\nsaw,2024-02-11,240\n",
    },
    (
        Question(
            "Where is the key to the shed?", "keys.txt", "behind the water butt", "nail behind the water butt.\nThe"
        ),
        Question("What did the mower cost?", "mowers.csv", "240", "mower,2021-04-02,240"),
        Question("What colour is the gate?"),
    ),
)


def test_a_question_about_a_folder_has_the_passages_that_a_search_finds() -> None:
    key, mower, colour = asked(SHED, load_embedder("minilm"))
    assert all(example.document[slice(*span)] == "behind the water butt" for example in key for span in example.spans)
    assert any(example.spans for example in key) and not any(example.spans for example in colour)
    answering = [example for example in mower if example.spans]
    assert [example.document[slice(*span)] for example in answering for span in example.spans] == ["240"]
    assert "mower" in answering[0].document and "saw" not in answering[0].document, "another row has the same price"


def test_parts_of_a_passage_keep_its_answer_and_what_is_left_without_it_does_not_answer() -> None:
    document = "Dogs\nRex is fed at six. Bella has had her tablets. The lead hangs on the red hook.\nBoth bark."
    begin = document.index("the red hook")
    whole = Example("Where is the lead?", document, ((begin, begin + len("the red hook")),))
    found = list(varied(random.Random(1), [whole, Example("Who barks?", "Nobody.", ())], parts=20))
    assert found[0] == whole and found[-1].document == "Nobody."
    answering, silent = [e for e in found[1:-1] if e.spans], [e for e in found[1:-1] if not e.spans]
    assert len({each.document for each in answering}) > 5
    assert {each.document[slice(*span)] for each in answering for span in each.spans} == {"the red hook"}
    assert ["red hook" in each.document for each in silent] == [False]


def test_the_folders_that_are_kept_answer_their_questions() -> None:
    found = folders()
    assert len(found) > 100 and len({each.name for each in found}) == len(found)
    for folder in found:
        for question in folder.questions:
            if question.file:
                assert folder.files[question.file].count(question.near) == 1 == question.near.count(question.answer)


def _encodings() -> Encodings:
    def one(length: int, *answers: tuple[int, int]) -> Encoded:
        return Encoded([101, *range(1000, 998 + length), 102], 3, answers)

    return Encodings.of([[one(9, (4, 5)), one(7), one(8), one(12, (6, 6), (8, 9))], [one(6), one(10)]])


def test_encoded_examples_are_kept_in_a_file(tmp_path: Path) -> None:
    made = _encodings()
    made.save(tmp_path / "made.npz")
    kept = Encodings.load(tmp_path / "made.npz")
    ids, answers = kept.padded(np.array([1, 3]))
    assert ids.shape == (2, 12) and ids[0, 6] == 102 and not ids[0, 7:].any()
    assert answers.tolist() == [[[0, 0], [-1, -1]], [[6, 6], [8, 9]]]
    assert kept.groups.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_question_is_drawn_with_passages_that_answer_and_rivals() -> None:
    examples, rng = _encodings(), np.random.default_rng(1)
    source = drawn(examples, rng, together=True)
    for rows in (next(source) for _ in range(40)):
        assert len(set(examples.groups[rows].tolist())) == 1 and len(set(rows.tolist())) == len(rows)
        assert (examples.counts[rows] > 0).any() == (examples.groups[rows[0]] == 0)
    alone = drawn(examples, rng, together=False)
    seen = [int(row) for row in (next(alone)[0] for _ in range(40))]
    assert abs(sum(examples.counts[row] > 0 for row in seen) - 20) <= 2


def test_spans_of_all_passages_of_a_question_share_one_normalisation() -> None:
    examples = _encodings()
    batch = Batch.of(examples, np.arange(6), torch.device("cpu"), together=True)
    scored = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1))
    at = torch.arange(12)
    scored[:, (at >= batch.lengths[:, None] - 1) | ((at > 0) & (at < 3))] = -1e4
    odds = (scored[0][:, :, None] + scored[1][:, None, :] - scored[:, :, 0].sum(0)[:, None, None]).double().exp()
    spans = odds[:, 3:, 3:].sum((1, 2))
    right = odds[0, 4, 5] + odds[3, 6, 6] + odds[3, 8, 9]
    wanted = [-(right / (1 + spans[:4].sum())).log().item(), -(1 / (1 + spans[4:].sum())).log().item()]
    assert shared_loss(scored, batch).tolist() == pytest.approx(wanted, rel=1e-4)
    sure = torch.full((2, 6, 12), -1e4)
    for row, (first, last) in enumerate(((4, 5), (0, 0), (0, 0), (6, 6), (0, 0), (0, 0))):
        sure[0, row, first] = sure[1, row, last] = 30.0
        sure[:, row, 0] = sure[:, row, 0].clamp_min(0.0)
    assert float(loss_of(sure, batch)) == pytest.approx(0.0, abs=1e-3)
