"""Rerankers: a cross-encoder, and late interaction."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from paceline.errors import ConfigError
from paceline.rag.embedder import MAX_TOKENS, WIDTH, MiniLMEmbedder
from paceline.rag.rerank import NO_TOKENS, CrossEncoder, LateInteraction, best_first, load_reranker
from tests.rag.index.test_search_quality import CORPUS

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
POSITIONS = 24
QUERY, PASSAGES = "w1 w2 w3", ["w4 w5", "w1 w2 w3 w4", "w9", "w30 w31 w32 w33 w34", ""]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def made(labels: int = 1, *, head: bool = True) -> Path:
        """The folder of a tiny random BERT, as `save_pretrained` writes it."""
        directory = tmp_path_factory.mktemp("bert")
        torch.manual_seed(labels)
        config = BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=POSITIONS, num_labels=labels, initializer_range=0.5,
        )  # fmt: skip
        (BertForSequenceClassification if head else BertModel)(config).save_pretrained(directory)
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        ).save_pretrained(directory)
        return directory

    return made


def reference(directory: Path, query: list[int], passage: list[int]) -> list[float]:
    """Logits of transformers for ids put together here."""
    model = BertForSequenceClassification.from_pretrained(directory, attn_implementation="eager")
    model.train(False)
    ids = [2, *query, 3, *passage, 3]
    kinds = [0] * (len(query) + 2) + [1] * (len(passage) + 1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0]
    return [float(each) for each in logits]


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_transformers(labels: int, make: Callable[..., Path]) -> None:
    directory = make(labels)
    reranker = load_reranker(str(directory))
    assert reranker.name == directory.name
    logits = [reference(directory, ids_of(QUERY), ids_of(passage)) for passage in PASSAGES]
    expected = [each[0] if labels == 1 else each[1] - each[0] for each in logits]
    scores = reranker.score(QUERY, PASSAGES)
    assert scores.dtype == np.float32
    assert scores == pytest.approx(expected, abs=1e-4)
    assert len({round(float(score), 3) for score in scores}) > 2


def test_a_score_does_not_depend_on_the_other_passages(make: Callable[..., Path]) -> None:
    reranker = CrossEncoder(make())
    together = reranker.score(QUERY, PASSAGES)
    order = random.Random(1).sample(range(len(PASSAGES)), len(PASSAGES))
    assert list(reranker.score(QUERY, [PASSAGES[i] for i in order])) == [together[i] for i in order]
    assert reranker.score(QUERY, []).shape == (0,)


def test_what_does_not_fit_is_cut_from_the_longer_text(make: Callable[..., Path]) -> None:
    directory = make()
    reranker = CrossEncoder(directory)
    room = POSITIONS - 3 - len(QUERY.split())
    long = [f"w{i}" for i in range(50)]
    (score,) = reranker.score(QUERY, [" ".join(long)])
    assert score == pytest.approx(reference(directory, ids_of(QUERY), ids_of(" ".join(long[:room])))[0], abs=1e-4)
    assert np.isfinite(reranker.score(" ".join(long), ["w1", " ".join(long)])).all()


def test_a_model_without_a_scoring_head_is_refused(make: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="is no cross-encoder: it lacks classifier"):
        CrossEncoder(make(head=False))
    with pytest.raises(ConfigError, match="3 labels"):
        CrossEncoder(make(3))


def test_pickled_weights_and_code_of_a_model_are_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    directory = make()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pytorch_model\.bin, and unpickling can run code"):
        CrossEncoder(directory)
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}', "utf-8")
    (own / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", "utf-8")
    (own / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be loaded as a cross-encoder"):
        CrossEncoder(own)
    assert not (tmp_path / "ran").exists()


def test_a_name_that_is_not_on_this_machine_is_not_downloaded() -> None:
    with pytest.raises(ConfigError, match="nor a model that was downloaded before"):
        load_reranker("some/reranker")
    with pytest.raises(ConfigError, match="no model directory"):
        load_reranker("no such folder")


# ---- late interaction over MiniLM -----------------------------------------------------------------------------------
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


@pytest.mark.parametrize("name", [*CORPUS][::3])  # one of each group of similar documents
def test_each_question_ranks_its_passage_first(name: str, reranker: LateInteraction) -> None:
    names = list(TEXTS)
    scores = reranker.score(CORPUS[name][1], list(TEXTS.values()))
    assert names[best_first(scores)[0]] == name


def test_a_score_does_not_depend_on_the_other_passages_to_the_last_bit(reranker: LateInteraction) -> None:
    passages = [*TEXTS.values(), "short", "word " * 300, *TEXTS.values()][:18]  # more than are scored at once
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
