"""Prompts of the passages of both sides: in one context or each in its own, and what each passage weighs."""

from __future__ import annotations

import math

import pytest

from paceline.core.aggregation.weights import log_weight
from paceline.engine.fake import ByteTokenizer
from paceline.rag.prompt import relevance
from paceline.rag.records import Passage
from paceline.runtime.service import Citation
from paceline.runtime.sessions.prompts import PeerScales, PromptSet, prompts_of, sharing_words
from paceline.strategies.base import Branch
from paceline.wire.messages import RelevanceScale

ASKED = [{"role": "user", "content": "Who keeps the key?"}]
OWN = (
    Passage("boat.md", 1, "Boat", "Mr Iwu keeps the key of boat 12.", 0.7),
    Passage("mill.md", 2, "Mill", "The mill is closed.", 0.4),
)
THEIRS = (Passage("town.md", 3, "Town", "The town hall opens at nine.", 0.5),)


def read(*, together: bool, max_prompt: int = 2000) -> PromptSet:
    return prompts_of(
        ASKED,
        None,
        ByteTokenizer(),
        k=2,
        max_prompt=max_prompt,
        found=OWN,
        others=THEIRS,
        reading="together" if together else "apart",
    )


def test_all_passages_stand_in_one_context_in_their_order_and_weigh_as_before() -> None:
    prompts = read(together=True)
    (branch,) = prompts.branches
    text = ByteTokenizer().decode(branch.prompt)
    places = [text.index(passage.text) for passage in (*OWN, *THEIRS)]
    assert places == sorted(places) and text.index("Who keeps the key?") > places[-1]
    assert branch.score == log_weight([relevance(passage) for passage in (*OWN, *THEIRS)])
    assert (prompts.passages, prompts.peer_passages) == (OWN, THEIRS)
    apart = read(together=False)
    assert len(apart.branches) == 3 and (apart.passages, apart.peer_passages) == (OWN, THEIRS)


def test_what_does_not_fit_one_context_is_cut_and_the_rest_left_out() -> None:
    whole = read(together=True).longest
    for room in range(read(together=True, max_prompt=0).plain_tokens, whole + 1):
        prompts = read(together=True, max_prompt=room)
        assert prompts.longest <= max(room, prompts.plain_tokens)
        assert len(prompts.branches) == 1 and prompts.together == bool(prompts.passages)
    assert read(together=True, max_prompt=whole - 1).peer_passages, "cut at a word"


def test_the_sides_weigh_alike_in_one_context_too() -> None:
    assert [branch.score for branch in read(together=True).with_equal_sides().branches] == [0.0]
    apart = read(together=False).with_equal_sides().branches
    assert [sum(branch.score == 0.0 for branch in apart)] == [1], "the other side's only passage"


def test_a_passage_of_one_context_is_cited_for_a_word_that_the_answer_has_of_it() -> None:
    cited = [Citation("device", each.document, each.text, each.score) for each in (*OWN, *THEIRS)]
    for said, documents in {"It is Mr Iwu in 12.": ["boat.md"], "At nine; closed.": ["mill.md", "town.md"]}.items():
        assert [each.document for each in sharing_words(cited, said, "Who keeps the key?")] == documents
    assert sharing_words(cited, "The key.", "Who keeps the key?") == tuple(cited), "nothing tells them apart"
    assert sharing_words([], "Nine.", "When?") == ()
    scripts = [
        Citation("device", "a.md", "鍵は田中さんにあります。", 0.5),
        Citation("device", "b.md", "家賃は六万円です。", 0.5),
    ]
    assert sharing_words(scripts, "六万円", "家賃はいくら?") == (scripts[1],), (
        "words of a script without blanks are short"
    )


# ---- relevance of two sides on different scales: the documents of each side weigh the same together -----------------
MINILM = RelevanceScale("a" * 64, 0.8)
PASSAGE = Passage("page.md", 1, "", "text", 0.5)


def scores(prompts: PromptSet) -> list[float]:
    return [branch.score for branch in prompts.branches if branch.score is not None]


def difference(own: RelevanceScale | None, peer: RelevanceScale | None) -> str:
    scales = PeerScales(own)
    scales.told("cloud", peer)
    return scales.difference("cloud")


def test_the_same_scale_and_a_side_without_documents_differ_in_nothing() -> None:
    assert difference(MINILM, RelevanceScale("a" * 64, 0.8)) == ""
    assert difference(MINILM, None) == difference(None, MINILM) == PeerScales(MINILM).difference("cloud") == ""


def test_what_differs_is_named() -> None:
    assert difference(MINILM, RelevanceScale("hash", 0.8)).endswith("since their embedders differ")


@pytest.mark.parametrize("follows", [True, False])
def test_a_device_follows_the_temperature_that_its_cloud_tells(follows: bool) -> None:
    scales = PeerScales(MINILM, follows=follows)
    scales.told("cloud", None)
    scales.told("cloud", RelevanceScale("a" * 64, 0.5))
    assert (scales.temperature, scales.difference("cloud")) == (0.5 if follows else 0.8, "")
    assert scales.temperature_at("answer-private") == scales.temperature and scales.temperature_at("local-only") == 0.8


def test_documents_of_both_origins_weigh_the_same_and_keep_their_own_order() -> None:
    branches = (Branch((1,), 2.0), Branch((2,), 1.0), Branch((3,), -4.0))
    prompts = PromptSet(branches, (PASSAGE, PASSAGE), 1, peer_passages=(PASSAGE,)).with_equal_sides()
    own, other = scores(prompts)[:2], scores(prompts)[2:]
    assert log_weight(own) == pytest.approx(0.0) and other == [0.0]
    assert own[0] - own[1] == pytest.approx(1.0)


def test_a_device_whose_scale_differs_weighs_as_much_as_its_cloud_and_tells_no_score() -> None:
    branches = (Branch((1,), 2.0), Branch((2,), 1.0))
    prompts = PromptSet(branches, (PASSAGE, PASSAGE), 1).without_relevance(0.5).with_equal_sides()
    assert scores(prompts) == pytest.approx([-math.log(2)] * 2)


def test_a_prompt_without_a_document_stays_as_it_is() -> None:
    prompts = PromptSet((Branch((1,), None),), (), 1)
    assert prompts.with_equal_sides() == prompts
