from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from paceline.rag import embedder
from paceline.rag.embedder import MAX_TOKENS, MiniLMEmbedder, package_directory
from tests.kernels import built

if TYPE_CHECKING:
    from types import ModuleType

    import torch


@pytest.fixture(scope="session")
def minilm() -> MiniLMEmbedder:
    return MiniLMEmbedder()


@pytest.fixture(scope="session")
def in_float32() -> MiniLMEmbedder:
    """MiniLM as on a machine without the kernel in C."""
    return with_kernel(None)


def with_kernel(kernel: ModuleType | None) -> MiniLMEmbedder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedder, "kernel", lambda: kernel)
        loaded = MiniLMEmbedder()
        loaded.embed(["loaded at the first"])
    return loaded


@pytest.fixture(scope="session")
def quantised() -> MiniLMEmbedder:
    """MiniLM by the kernel as its source is now."""
    kernel = built("paceline.rag._encoder_kernel")
    if not kernel.is_supported():
        pytest.skip("this processor has no VNNI")
    return with_kernel(kernel)


@pytest.fixture(scope="session")
def plain_outputs() -> Callable[[str], torch.Tensor]:
    """(tokens, WIDTH) of a text, special tokens included, by transformers' own encoder."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    directory = package_directory()
    model = BertModel.from_pretrained(directory, config=BertConfig.from_pretrained(directory))
    model.train(False)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()

    def outputs(text: str) -> torch.Tensor:
        with torch.no_grad():
            rows: torch.Tensor = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            return rows

    return outputs
