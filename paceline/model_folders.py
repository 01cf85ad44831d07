"""Folders of models: found by path or by name on the Hugging Face hub, refused unless their weights are safetensors.

For the engine and for cross-encoders. Knows nothing of what a model is for; transformers is imported only to be quiet.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ConfigError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_OLLAMA_NAME = re.compile(r"[\w./-]+:[\w.-]+")  # a tag after a colon, which no name of the hub has
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def served_name(path_or_name: str | Path) -> str:
    """Name of the directory, or the hub name as given."""
    path = Path(path_or_name).expanduser()
    return path.resolve().name if path.is_dir() else str(path_or_name)


def find(path_or_name: str | Path, *, download: bool = True) -> Path:
    """Directory of the model, downloaded for a hub name. Raises ConfigError.

    download: False for what an earlier download has left on this machine, and nothing else.
    """
    directory = Path(path_or_name).expanduser()
    if not directory.is_dir():
        _check_kind(str(path_or_name))
        directory = _snapshot(str(path_or_name), download)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model: it has no config.json. Give a directory saved by transformers.")
    if not any(directory.glob("*.safetensors")):
        pickled = [file.name for pattern in _PICKLED for file in directory.glob(pattern)]
        found = f", only {pickled[0]}, and unpickling can run code" if pickled else ""
        raise ConfigError(
            f"{directory} has no *.safetensors weights{found}. "
            "Convert it with save_pretrained, or choose another model."
        )
    return directory


def _check_kind(name: str) -> None:
    """Raises ConfigError for what other programs run and this one does not."""
    if name.lower().endswith(".gguf") or "-gguf" in name.lower():
        raise ConfigError(
            f"{name} names a model in GGUF, which is not read: give the same model with safetensors, as a Hugging Face "
            "name such as Qwen/Qwen2.5-0.5B-Instruct or a directory."
        )
    if _OLLAMA_NAME.fullmatch(name) and not name.startswith("fake:"):
        raise ConfigError(
            f"{name} reads like a name of Ollama, whose models are GGUF and are not read: give the same model as a "
            "Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct, or a directory with safetensors."
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports during loading."""
    from transformers.utils import logging as transformers_logging

    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # as above


def _snapshot(name: str, download: bool) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"There is no model directory {name}. Give an existing directory or a Hugging Face name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=not download))
    except Exception as error:  # the hub's client passes on errors of several HTTP libraries
        if not download:
            raise ConfigError(
                f"{name} is neither a directory here nor a model that was downloaded before. Download it with "
                f"`hf download {name}`, or give a directory."
            ) from error
        raise ConfigError(
            f"{name} is neither a directory here nor a model that can be fetched from the Hugging Face hub "
            f"({type(error).__name__}). Check the name and the network, or give a directory."
        ) from error
