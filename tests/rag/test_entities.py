"""Names by a model that labels tokens: a BERT made here, whose word vectors say what each word is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from paceline.core.redaction import Redactor, combined, find_entities
from paceline.errors import ConfigError
from paceline.rag.entities import load_entity_model

LABELS = ["O", "B-PER", "I-PER", "B-ORG", "LOC"]
WORDS = {
    "[PAD]": 0,
    "[UNK]": 0,
    "[CLS]": 0,
    "[SEP]": 0,
    "ada": 1,
    "love": 2,
    "##lace": 2,
    "acme": 3,
    "kiel": 4,
    "in": 0,
}
POSITIONS = 16


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def made(labels: list[str]) -> Path:
        directory = tmp_path_factory.mktemp("ner")
        config = BertConfig(
            vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=0, num_attention_heads=2, intermediate_size=8,
            max_position_embeddings=POSITIONS, num_labels=len(labels), id2label=dict(enumerate(labels)),
        )  # fmt: skip
        model = BertForTokenClassification(config)
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
            model.bert.embeddings.LayerNorm.weight.fill_(1.0)
            for place, label in enumerate(WORDS.values()):
                model.bert.embeddings.word_embeddings.weight[place, label] = 1.0
            model.classifier.weight[:, : len(labels)] = torch.eye(len(labels))
        model.save_pretrained(directory)
        words = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        ).save_pretrained(directory)
        return directory

    return made


def test_words_that_the_model_labels_are_hidden_also_beyond_its_window(make: Callable[..., Path]) -> None:
    find = load_entity_model(make(LABELS))
    text = " in" * 40 + " ada lovelace in kiel, acme." + " in" * 40 + " ada"
    assert [(text[a:b], kind) for a, b, kind in find(text)] == [
        ("ada lovelace", "PERSON"),
        ("kiel", "PLACE"),
        ("acme", "ORGANISATION"),
        ("ada", "PERSON"),
    ]
    redactor = Redactor(combined(find_entities, find))
    redactor.learn("in kiel 4711-0815")
    assert redactor.redact("in kiel 4711-0815") == "in [PLACE_1] [NUMBER_1]"
    assert list(find("")) == [] and list(find("?!")) == []


def test_what_names_no_kinds_or_is_no_such_model_is_refused(make: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a model for named entities"):
        load_entity_model(make(["O", "NOUN", "VERB", "X", "Y"]))
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            load_entity_model(folder)
