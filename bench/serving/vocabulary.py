"""A tokenizer of any size without training: every id that a model may sample is a word of made-up syllables.

A word is one to three syllables of a consonant and a vowel behind a space. Its merges are unambiguous, so that the text
of sampled words is encoded to the same ids again, as in a conversation that is sent back with the next turn. Each word
is valid UTF-8, so that a token becomes text at once.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SPACE: Final = "\u0120"  # a space in the byte alphabet of GPT-2's tokenizer
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SYLLABLES: Final = tuple(c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou")
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BYTES: Final = 256
FIRST_WORD: Final = BYTES + len(SYLLABLES)  # ids below it are parts of words, those of `SPECIAL` are the last


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in the order of their ids, and the merges in their order of preference."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    @staticmethod
    def of(size: int) -> Vocabulary:
        """A vocabulary with this number of ids, between 500 and a million."""
        words = itertools.chain.from_iterable(itertools.product(SYLLABLES, repeat=n) for n in (1, 2, 3))
        parts = list(itertools.islice(words, size - FIRST_WORD - len(SPECIAL)))
        merges = [(s[0], s[1]) for s in SYLLABLES]
        merges += [(SPACE + "".join(word[:-1]), word[-1]) for word in parts]
        tokens = (*_byte_alphabet(), *SYLLABLES, *(SPACE + "".join(word) for word in parts), *SPECIAL)
        return Vocabulary(tokens, tuple(merges))

    @property
    def words(self) -> range:
        """Ids of whole words."""
        return range(FIRST_WORD, len(self.tokens) - len(SPECIAL))

    def word(self, number: int) -> str:
        """Text of one token, its leading space included. number: any, taken modulo the number of words."""
        return self.tokens[self.words[number % len(self.words)]].replace(SPACE, " ")

    def write(self, directory: Path, *, max_positions: int) -> None:
        """Write a tokenizer that transformers and Paceline load. It names no end token: no answer ends by itself."""
        ids = {token: i for i, token in enumerate(self.tokens)}
        added = [_special(ids[name], name) for name in SPECIAL]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for token, i in ids.items() if token not in SPECIAL},
            "merges": [list(pair) for pair in self.merges],
        }
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_positions,
            "chat_template": TEMPLATE,
        }
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _special(token: int, name: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": name, "special": True, **flags}


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character of each byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = itertools.count(BYTES)
    return [chr(byte if byte in printable else next(hidden)) for byte in range(BYTES)]
