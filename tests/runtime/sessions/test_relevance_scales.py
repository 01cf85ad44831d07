"""Relevance of two sides on different scales: the documents of each side weigh the same together."""

from __future__ import annotations

import math

import pytest

from paceline.core.aggregation.weights import log_weight
from paceline.rag.records import Passage
from paceline.runtime.sessions.prompts import PeerScales, PromptSet
from paceline.strategies.base import Branch
from paceline.wire.messages import RelevanceScale

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
