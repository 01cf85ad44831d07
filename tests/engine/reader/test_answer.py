"""Next-token distributions of an answer: of one document, and of the mixture with another that does not know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.aggregation.weights import mix
from paceline.core.sampling.dist import Dist
from paceline.engine.reader.answer import AnswerDists, Ids, PartTexts, Wording, part_of

END, STOP, FIRST, JOINT, NOTHING = 1, 2, (7, 8), (3, 4), (5, 6)
A, B, C = (10, 11), (10, 12), (13,)
WORDING = Wording(
    vocab_size=202,
    plain=np.array([0.0, 0.0, *[1 / 200] * 200]),
    nothing=NOTHING,
    nothing_of_several=NOTHING,
    foreign=NOTHING,
    first=FIRST,
    joints=(JOINT, (3, 9)),
    stop=(STOP,),
    end=END,
)


def part(spans: Sequence[tuple[Ids, float]], answered: float) -> PartTexts:
    return part_of(spans, answered, NOTHING, alone=False)


def written(*answers: AnswerDists, limit: int = 20) -> Ids:
    """The greedy answer of the mixture of these documents, with even weights."""
    said: Ids = ()
    while len(said) < limit and (not said or said[-1] != END):
        said += (mix([each.next(said) for each in answers], [0.0] * len(answers)).argmax(),)
    return said


KNOWS_A = AnswerDists([part([(A, 0.7), (B, 0.3)], 0.95)], WORDING)
IGNORANT = AnswerDists([part([(C, 1.0)], 0.02)], WORDING)


def test_a_document_that_knows_says_its_best_text_and_ends() -> None:
    assert written(KNOWS_A) == (*A, STOP, END)


def test_the_first_token_has_the_mass_of_all_texts_that_begin_with_it() -> None:
    assert KNOWS_A.next(()).prob(10) == pytest.approx(0.95, abs=0.01)
    assert KNOWS_A.next((10,)).prob(11) / KNOWS_A.next((10,)).prob(12) == pytest.approx(7 / 3, rel=0.05)


def test_a_document_that_does_not_know_says_so() -> None:
    assert written(IGNORANT) == (*NOTHING, STOP, END)


@pytest.mark.parametrize("others", [1, 3, 7])
def test_documents_that_do_not_know_do_not_silence_one_that_does(others: int) -> None:
    assert written(KNOWS_A, *[IGNORANT] * others) == (*A, STOP, END)


def test_two_documents_each_say_their_part() -> None:
    first = AnswerDists([part([(A, 1.0)], 0.9), part([(C, 1.0)], 0.03)], WORDING)
    second = AnswerDists([part([(B, 1.0)], 0.04), part([(C, 1.0)], 0.9)], WORDING)
    assert written(first, second) == (*FIRST, *A, *JOINT, *C, STOP, END)


def test_a_part_that_nobody_knows_is_said_to_be_missing() -> None:
    answer = AnswerDists([part([(A, 1.0)], 0.9), part([(C, 1.0)], 0.03)], WORDING)
    assert written(answer) == (*FIRST, *A, *JOINT, *NOTHING, STOP, END)


def test_an_answer_that_the_document_does_not_know_is_brought_to_its_end() -> None:
    assert KNOWS_A.next((17, 18)).argmax() == STOP
    assert KNOWS_A.next((17, 18, STOP)).argmax() == END


@pytest.mark.parametrize(
    "said", [(), (10,), (10, 11), (10, 11, 2), (17,), (*A, 3), (*FIRST, *A, *JOINT), (7,), (0,), (1, 1)]
)
def test_every_row_is_a_distribution(said: Ids) -> None:
    for answer in (KNOWS_A, AnswerDists([part([(A, 1.0)], 0.9), part([], 0.0)], WORDING)):
        found: Dist = answer.next(said)
        assert found.probs.min() >= 0.0 and found.probs.sum() == pytest.approx(1.0)
