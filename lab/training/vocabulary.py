"""The demo pair's tokenizer: byte-level BPE with single digits, trained on the generated corpus."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.training.texts.corpus import converse
from lab.training.texts.phrases import outside_question

VOCABULARY_SIZE: Final = 2048
PAD, SYSTEM, USER, ASSISTANT, END = range(5)
SPECIAL_TOKENS: Final = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PREAMBLE: Final = "Answer from this document.\n"

# Qwen2's split: every digit is a token of its own, so that numbers are copied digit by digit.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def corpus_texts(rng: random.Random, count: int) -> Iterable[str]:
    """Texts of the training split, in the proportions of the training data."""
    for _ in range(count):
        conversation = converse(rng, "train")
        yield conversation.document or ""
        for turn in conversation.turns:
            yield turn.question
            yield turn.answer
        yield outside_question(rng)


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer in transformers' format, with the chat template in its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[SYSTEM:END]),
        "clean_up_tokenization_spaces": False,
        "one_document": True,
        "model_max_length": 1024,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
