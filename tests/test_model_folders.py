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
        ("model.gguf", "There is no file model.gguf"),
        ("TheBloke/Llama-2-7B-GGUF", "fetch one of them and give its path"),
        ("/nowhere", "no model directory"),
    ],
)
def test_a_name_of_another_kind_of_model_is_refused_with_what_to_give(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find(name, download=False)


def test_a_damaged_file_in_gguf_is_refused_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF file"):
        find(tmp_path / "tiny.gguf")
    assert not list(tmp_path.glob("cache/**/*partial"))
