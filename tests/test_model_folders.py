"""Names of models that other programs run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.hub.cache import find


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama3.2:1b", "a name of Ollama"),
        ("library/qwen2.5:0.5b-instruct", "a name of Ollama"),
        ("model.gguf", "GGUF, which is not read"),
        ("TheBloke/Llama-2-7B-GGUF", "GGUF, which is not read"),
        ("/nowhere", "no model directory"),
    ],
)
def test_a_name_of_another_kind_of_model_is_refused_with_what_to_give(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find(name, download=False)


def test_a_file_in_gguf_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF, which is not read"):
        find(tmp_path / "tiny.gguf")
