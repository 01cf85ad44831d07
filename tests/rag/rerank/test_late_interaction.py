"""Late interaction over MiniLM: against MaxSim written plainly, on questions of a small corpus, and at its edges."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from paceline.rag.embedder import MAX_TOKENS, WIDTH, MiniLMEmbedder, package_directory
from paceline.rag.rerank import NO_TOKENS, LateInteraction, best_first, load_reranker
from tests.rag.index.test_search_quality import CORPUS

TEXTS = {name: text for name, (text, _) in CORPUS.items()}
QUESTION = "How much do I pay every month for my apartment?"


@pytest.fixture(scope="module")
def reranker(minilm: MiniLMEmbedder) -> LateInteraction:
    return LateInteraction(minilm)


def plain_vectors(text: str) -> list[list[float]]:
    """Unit vectors of a text's tokens, by transformers' own encoder."""
    directory = package_directory()
    model = BertModel.from_pretrained(directory, config=BertConfig.from_pretrained(directory))
    model.train(False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    with torch.no_grad():
        outputs = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, 1:-1]
    return [(row / row.norm()).tolist() for row in outputs]


def plain_max_similarity(query: list[list[float]], passage: list[list[float]]) -> float:
    best = [max(sum(a * b for a, b in zip(one, other, strict=True)) for other in passage) for one in query]
    return sum(best) / len(best)


def test_a_score_is_the_mean_of_the_greatest_cosines(reranker: LateInteraction) -> None:
    passages = [TEXTS["flat.md"], TEXTS["train.txt"], "word " * 300]
    query = plain_vectors(QUESTION)
    expected = [plain_max_similarity(query, plain_vectors(passage)) for passage in passages]
    scores = reranker.score(QUESTION, passages)
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
