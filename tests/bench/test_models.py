"""Names of models for benches, and what is kept under them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import models
from bench.models import LARGE, SMALL, SMOLLM, RealModels, keep, kept
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "KEPT", tmp_path / "kept")


@pytest.mark.parametrize(
    ("text", "device", "cloud"),
    [("smollm", SMOLLM, SMOLLM), ("qwen", SMALL, LARGE), ("one", "one", "one"), ("a/b,./c", "a/b", "./c")],
)
def test_a_name_a_model_or_two_are_the_models_of_both_sides(text: str, device: str, cloud: str) -> None:
    assert RealModels.parse(text) == RealModels(device, cloud)


@pytest.mark.parametrize("text", ["a,b,c", "a,", ""])
def test_more_than_two_and_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--models takes smollm, qwen, a model, or two"):
        RealModels.parse(text)


def test_what_is_kept_is_found_by_its_name_and_known_by_its_sum(tmp_path: Path) -> None:
    file = tmp_path / "downloaded.gguf"
    file.write_bytes(b"GGUF")
    assert keep(SMALL, file) == "another file than that of the figures"
    assert Path(kept(SMALL)).read_bytes() == b"GGUF" and RealModels.parse("qwen").cloud == LARGE
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    keep(LARGE, folder)
    assert Path(kept(LARGE)).resolve() == folder
    assert RealModels.parse("qwen").label.endswith("on the device, saved in the cloud")


@pytest.mark.parametrize(
    ("name", "path", "said"), [(SMALL, "nothing", "neither a .gguf file nor a folder"), ("x", ".", "x is no model")]
)
def test_what_is_no_model_is_not_kept(tmp_path: Path, name: str, path: str, said: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=said):
        keep(name, tmp_path / path)
