"""Correctness of answers, choice of questions, and answers that need both sides."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import two_sided
from bench.report import Options
from bench.two_sided import GENERATED, TOGETHER, Question, is_correct, real
from paceline.core.side import SIDES
from paceline.rag.embedder import load_embedder

QUESTION = Question("When?", ("10th century", "no"), {}, is_exact=False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("In the 10th Century.", True),
        ("No.", True),
        ("Normandy, in the north", False),
        ("the 10th-century duke", False),
    ],
)
def test_a_real_answer_is_right_if_it_holds_the_expected_words(answer: str, expected: bool) -> None:
    assert is_correct(QUESTION, answer) == expected


def test_a_generated_answer_is_right_only_from_end_to_end() -> None:
    question = Question("When?", ("It opens at nine.",), {}, is_exact=True)
    assert is_correct(question, "It opens at nine.")
    assert not is_correct(question, "It opens at nine. It opens at ten.")


def test_together_they_answer_what_neither_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sided, "FEW", 6)
    report = two_sided.run(Options(quick=True))
    (row,) = report.rows
    assert row["questions"] == GENERATED and row["n"] == 6
    assert float(str(row[TOGETHER])) >= 0.5
    assert row["device only"] == row["cloud only"] == 0.0


def test_each_side_reads_its_best_paragraph(tmp_path: Path) -> None:
    paragraphs = {
        "a": "The bakery of Vell sells rye bread.",
        "b": "Rivers freeze in January.",
        "c": "The mayor of Vell is Ona Grist.",
        "d": "Copper melts at a thousand degrees.",
    }
    question = {
        "question": "Who is the mayor of Vell, and what does the bakery of Vell sell?",
        "answers": ["rye"],
        "device_paragraphs": ["b", "a"],
        "cloud_paragraphs": ["c", "d"],
    }
    lacking = question | {"answers": []}
    unanswerable = question | {"answerable": False}
    with gzip.open(tmp_path / "mine_paragraphs.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"pid": pid, "text": text}) + "\n" for pid, text in paragraphs.items())
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, (lacking, question, unanswerable))))
    (chosen,) = real(tmp_path, "mine", 5, load_embedder("minilm"))
    assert [chosen.documents[side] for side in SIDES] == [paragraphs["c"], paragraphs["a"]]
    assert not chosen.is_exact
