"""Late interaction over MiniLM: against MaxSim written plainly, on questions of a small corpus, and at its edges."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.rag.embedder import MAX_TOKENS, WIDTH, MiniLMEmbedder
from paceline.rag.rerank import NO_TOKENS, LateInteraction, best_first, load_reranker
from tests.rag.index.test_search_quality import CORPUS

TEXTS = {name: text for name, (text, _) in CORPUS.items()}
QUESTION = "How much do I pay every month for my apartment?"


@pytest.fixture(scope="module")
def reranker(minilm: MiniLMEmbedder) -> LateInteraction:
    return LateInteraction(minilm)


def plain_max_similarity(query: list[list[float]], passage: list[list[float]]) -> float:
    best = [max(sum(a * b for a, b in zip(one, other, strict=True)) for other in passage) for one in query]
    return sum(best) / len(best)


def test_a_score_is_the_mean_of_the_greatest_cosines(
    in_float32: MiniLMEmbedder, plain_outputs: Callable[[str], torch.Tensor]
) -> None:
    def vectors(text: str) -> list[list[float]]:
        return [(row / row.norm()).tolist() for row in plain_outputs(text)[1:-1]]

    passages = [TEXTS["flat.md"], TEXTS["train.txt"], "word " * 300]
    expected = [plain_max_similarity(vectors(QUESTION), vectors(passage)) for passage in passages]
    scores = LateInteraction(in_float32).score(QUESTION, passages)
    assert scores.dtype == np.float32
    assert scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CORPUS)
def test_each_question_ranks_its_passage_first(name: str, reranker: LateInteraction) -> None:
    names = list(TEXTS)
    scores = reranker.score(CORPUS[name][1], list(TEXTS.values()))
    assert names[best_first(scores)[0]] == name


def test_a_score_does_not_depend_on_the_other_passages_to_the_last_bit(reranker: LateInteraction) -> None:
    passages = [*TEXTS.values(), "short", "word " * 300] * 2  # more than are scored at once
    together = reranker.score(QUESTION, passages)
    order = list(range(len(passages)))
    random.Random(1).shuffle(order)
    shuffled = reranker.score(QUESTION, [passages[i] for i in order])
    alone = [reranker.score(QUESTION, [passage])[0] for passage in passages[:4]]
    assert [together[i] for i in order] == list(shuffled)
    assert alone == list(together[:4])


def test_token_vectors_have_unit_norm_and_none_is_of_a_special_token(minilm: MiniLMEmbedder) -> None:
    texts = [QUESTION, "", " \n", "word " * 300]
    vectors = minilm.token_vectors(texts)
    assert [each.shape for each in vectors] == [(minilm.count(QUESTION), WIDTH), (0, WIDTH), (0, WIDTH), (254, WIDTH)]
    assert np.allclose(np.linalg.norm(vectors[0], axis=1), 1, atol=1e-5)
    assert minilm.token_vectors([]) == []


def test_text_beyond_the_window_does_not_count(reranker: LateInteraction) -> None:
    start = "word " * (MAX_TOKENS - 2)
    scores = reranker.score(QUESTION, [start, start + TEXTS["flat.md"]])
    assert scores[0] == scores[1]


def test_empty_passages_come_last_and_an_empty_query_ranks_nothing(reranker: LateInteraction) -> None:
    assert reranker.score(QUESTION, []).shape == (0,)
    scores = reranker.score(QUESTION, ["", "the night train to Lisbon"])
    assert scores[0] == NO_TOKENS < scores[1]
    nothing = reranker.score(" ", ["", "one", "other"])
    assert not nothing.any()
    assert best_first(nothing) == [0, 1, 2]


def test_the_default_reranker_uses_the_encoder_that_is_given(minilm: MiniLMEmbedder) -> None:
    reranker = load_reranker(encoder=minilm)
    assert reranker.name == "late-interaction-minilm"
    assert reranker.score(QUESTION, [TEXTS["flat.md"]]).shape == (1,)
