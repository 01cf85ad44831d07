"""A random-weight model of Qwen2.5-0.5B's shape as a folder that every server under test can load.

Speed does not depend on the weights, but sampling does on how even the distributions are, and an end token on its
logit. So the last norm is scaled to logits of a standard deviation of `SPREAD`, about that of a trained model, and the
embeddings of all ids but whole words are zero: these get the logit 0, some twenty below the highest, and are not
sampled. No file names an end token.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from paceline.engine.loader import quiet

from .vocabulary import SPECIAL, Vocabulary

SPREAD: Final = 4.8  # standard deviation of the logits
STD: Final = 0.02  # of the weights
WEIGHTS: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; by default those of Qwen2.5-0.5B."""

    layers: int = 24
    hidden: int = 896
    inner: int = 4864
    heads: int = 14
    kv_heads: int = 2
    vocab: int = 151_936
    positions: int = 8192
    small: bool = False  # below the size at which a server would choose bfloat16


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folder, and what the bench needs to know of it."""

    directory: Path
    shape: Shape
    vocabulary: Vocabulary
    dtype: str
    parameters: int

    @property
    def weight_bytes(self) -> int:
        return (self.directory / WEIGHTS).stat().st_size

    @staticmethod
    def write(directory: Path, shape: Shape) -> ModelFiles:
        directory.mkdir(parents=True, exist_ok=True)
        vocabulary = Vocabulary.of(shape.vocab)
        vocabulary.write(directory, max_positions=shape.positions)
        dtype = _dtype(shape)
        model = _random(shape, vocabulary, dtype)
        with quiet():
            model.save_pretrained(directory)
        generation = {"do_sample": False, "pad_token_id": shape.vocab - len(SPECIAL)}
        (directory / "generation_config.json").write_text(json.dumps(generation))
        parameters = sum(weight.numel() for weight in model.parameters())
        return ModelFiles(directory, shape, vocabulary, str(dtype).removeprefix("torch."), parameters)

    def text(self, seed: int, words: int) -> str:
        """A text of this number of tokens. Texts of two seeds differ from their first word on."""
        draw = torch.Generator().manual_seed(seed)
        numbers = torch.randint(len(self.vocabulary.words), (max(0, words - 1),), generator=draw).tolist()
        return "".join(self.vocabulary.word(number) for number in (seed, *numbers))


def _dtype(shape: Shape) -> torch.dtype:
    """bfloat16 where this machine computes in it, else float32. The same test as the server's own."""
    native = torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if native and not shape.small else torch.float32


def _random(shape: Shape, vocabulary: Vocabulary, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        initializer_range=STD,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=shape.vocab - len(SPECIAL),
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    words = vocabulary.words
    with torch.no_grad():
        embeddings = model.get_parameter("model.embed_tokens.weight")  # (vocab, hidden), the output's too
        embeddings[: words.start] = 0.0
        embeddings[words.stop :] = 0.0
        model.get_parameter("model.norm.weight").fill_(SPREAD / (STD * math.sqrt(shape.hidden)))
    return model
