"""A random-weight model of Qwen2.5-0.5B's shape as a folder that every server under test can load.

Speed does not depend on the weights, but sampling does on how even the distributions are, and an end token on its
logit. So only whole words are sampled, from logits spread as a trained model's are. No file names an end token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from paceline.engine.loader import quiet
from paceline.engine.tensors import computes_bfloat16

from ..random_model import Shape, add_noise, random_model, spread_logits
from .vocabulary import SPECIAL, Vocabulary

WEIGHTS: Final = "model.safetensors"


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
    def write(directory: Path, shape: Shape, *, noise: float = 0.0) -> ModelFiles:
        """noise: in the output's weights, by their own deviation, so that a second model is like the first."""
        directory.mkdir(parents=True, exist_ok=True)
        vocabulary = Vocabulary.of(shape.vocab)
        vocabulary.write(directory, max_positions=shape.positions)
        dtype = _dtype(shape)
        model = random_model(shape, dtype, pad_token_id=shape.vocab - len(SPECIAL))
        spread_logits(model, vocabulary.words)
        if noise:
            add_noise(model, noise)
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
    native = torch.cuda.is_available() or computes_bfloat16()
    return torch.bfloat16 if native and not shape.small else torch.float32
