"""The models in the hub's cache on this machine, whoever has fetched them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import ConfigError
from paceline.hub.facts import ModelFacts, facts_of
from paceline.hub.names import FILE, HubName, path_part
from paceline.hub.transfer import PARTIAL

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_FOLDER: Final = "models--"  # before the name, whose slash is `--` too


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a model."""

    name: str
    revision: str  # the commit
    labels: tuple[str, ...]  # branches and tags that named it when it was fetched
    directory: Path
    size: int  # bytes, of which other revisions may share some
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A model of which an interrupted download has left files in part."""

    name: str
    size: int  # bytes of those parts


@dataclass(frozen=True, slots=True)
class Removed:
    name: str
    revisions: tuple[str, ...]
    freed: int  # bytes


def cached_models() -> list[CachedModel]:
    """By name, the latest fetched revision of each first."""
    found = []
    for repository in sorted(_models(_scan()), key=lambda each: each.repo_id):
        revisions = sorted(repository.revisions, key=lambda each: each.last_modified, reverse=True)
        found += [_cached(repository.repo_id, revision) for revision in revisions]
    return found


def unfinished_models() -> list[Unfinished]:
    """By name; another download of each goes on where it was cut."""
    sizes = ((folder, _size(folder.glob(f"blobs/*{PARTIAL}"))) for folder in sorted(_cache().glob(f"{_FOLDER}*")))
    return [Unfinished(folder.name.removeprefix(_FOLDER).replace("--", "/"), size) for folder, size in sizes if size]


def remove(name: HubName) -> Removed:
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
        return Removed(str(name), tuple(sorted(each.commit_hash for each in known)), freed)
    hashes = tuple(sorted(each.commit_hash for each in known if _is_named(each, name.revision)))
    if scan is None or not hashes:
        raise _absent(name)
    strategy = scan.delete_revisions(*hashes)
    strategy.execute()
    return Removed(str(name), hashes, strategy.expected_freed_size)


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


def _cached(name: str, revision: CachedRevisionInfo) -> CachedModel:
    path, labels = Path(revision.snapshot_path), tuple(sorted(revision.refs))
    return CachedModel(name, revision.commit_hash, labels, path, revision.size_on_disk, facts_of(path))
