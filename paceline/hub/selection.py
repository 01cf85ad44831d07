"""Which files of a repository make a model that can be run. Pure.

Weights are safetensors only: nothing is ever unpickled. Not handled: weights in subfolders, and variants such as
`model.fp16.safetensors` beside the plain ones, which are fetched too.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Final

from paceline.errors import ConfigError
from paceline.hub.names import FILE

WEIGHTS: Final = "*.safetensors"
PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FILES: Final = (WEIGHTS, "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
_TWICE: Final = "consolidated*.safetensors"  # the weights again, in the layout of their makers


def wanted_files(repository: str, names: Iterable[str]) -> list[str]:
    """Weights, tokenizer and configuration among the files of a repository. Raises ConfigError where there is no model
    that can be run, by what there is instead."""
    top = sorted(name for name in names if isinstance(name, str) and FILE.fullmatch(name))
    wanted = [name for name in top if any(fnmatch(name, pattern) for pattern in _FILES)]
    weights = [name for name in wanted if fnmatch(name, WEIGHTS)]
    own = [name for name in weights if not fnmatch(name, _TWICE)]
    if not weights:
        raise ConfigError(f"{repository} has no *.safetensors weights{_instead(top)}. Choose another model.")
    if "config.json" not in top:
        raise ConfigError(f"{repository} has no config.json, so it is no model of transformers. Choose another model.")
    return [name for name in wanted if name not in weights or name in (own or weights)]


def _instead(names: list[str]) -> str:
    if any(name.lower().endswith(".gguf") for name in names):
        return ": it holds GGUF, which is not read; the same model is most often there once more with safetensors"
    pickled = next((name for name in names if any(fnmatch(name, pattern) for pattern in PICKLED)), None)
    return "" if pickled is None else f", only {pickled}, and unpickling can run code"
