"""A model from the Hugging Face hub, into the hub's own cache, where every program of this machine finds it.

Files that are there already are not fetched again, nor parts of them. Refusals are sentences that say what to do.
`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` hold, as for every program that uses huggingface_hub.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from paceline.errors import ConfigError
from paceline.system import lock, unusable_proxy

# Names of models on the Hugging Face hub, with a revision behind an `@`.


MAIN: Final = "main"
_PART: Final = r"[A-Za-z0-9][\w.-]{0,95}"
SHA256: Final = re.compile(r"[0-9a-f]{64}")
GIT_SHA1: Final = re.compile(r"[0-9a-f]{40}")
FILE: Final = re.compile(r"\w[\w .+-]{0,200}")
REVISION: Final = re.compile(r"\w[\w./-]{0,127}")
_HUB_NAME: Final = re.compile(rf"({_PART}(?:/{_PART})?)(?:@(\w[\w./-]{{0,127}}))?")
_OLLAMA_NAME: Final = re.compile(r"[\w./-]+:[\w.-]+")  # a tag after a colon, which no name of the hub has


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and a branch, tag or commit of it."""

    repository: str
    revision: str | None = None  # None: the newest of `main`

    @staticmethod
    def parse(text: str) -> HubName:
        """Raises ConfigError for what is no name of the hub, and for what other programs run and this one does not."""
        check_kind(text)
        found = _HUB_NAME.fullmatch(text)
        if found is None or ".." in text or "--" in text:
            raise ConfigError(
                f"There is no model directory {text}. Give an existing directory or a Hugging Face name, with a "
                "revision as in NAME@REVISION if not the newest."
            )
        return HubName(found[1], found[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def path_part(name: object, *forms: re.Pattern[str]) -> str:
    """A name that came from elsewhere, before it becomes part of a path: it has one of these forms, and leads nowhere
    else.

    forms: `SHA256` and its like. Raises ConfigError.
    """
    text = name if isinstance(name, str) else ""
    if any(form.fullmatch(text) for form in forms) and not {"", ".", ".."} & set(text.split("/")):
        return text
    raise ConfigError(
        f"The hub names a file, a version or its content {str(name)[:80]!r}, which is no such name, and nothing of it "
        "was kept: check HF_ENDPOINT, and what lies between here and the hub."
    )


def check_kind(name: str) -> None:
    """Raises ConfigError for what the hub does not have."""
    if name.lower().endswith(".gguf"):
        raise ConfigError(f"There is no file {name}: `paceline models list` shows the GGUF files of other programs.")
    if "-gguf" in name.lower():
        raise ConfigError(
            f"{name} names GGUF files on the hub: fetch one of them and give its path, or give the same model with "
            "safetensors, such as Qwen/Qwen2.5-0.5B-Instruct."
        )
    if _OLLAMA_NAME.fullmatch(name) and not name.startswith("fake:"):
        raise ConfigError(
            f"{name} reads like a name of Ollama, whose store here has no such model: `ollama pull {name}` first, or "
            "give a Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct, a folder or a GGUF file."
        )


# Which files of a repository make a model that can be run.
#
# Weights are safetensors only: nothing is ever unpickled. Not handled: weights in subfolders, and variants such as
# `model.fp16.safetensors` beside the plain ones, which are fetched too.


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
        return ": it holds GGUF files, of which one may be fetched and given by its path"
    pickled = next((name for name in names if any(fnmatch(name, pattern) for pattern in PICKLED)), None)
    return "" if pickled is None else f", only {pickled}, and unpickling can run code"


# One file from the hub: written beside its place, continued where it was cut, checked, then moved there.
#
# The transfer is huggingface_hub's, with its session, proxies, credentials and waits. Its own download (2.4) throws
# away what a process that was killed has left, so a shard of 5 GB would begin anew; it makes paths of what stands in
# headers; and of the content it checks the size alone. tests/hub/test_models_command.py shows the first two.


MAX_FILE: Final = 1 << 40  # bytes, far above any file of a model
PARTIAL: Final = ".partial"  # behind the name of a file that is not whole yet
_CHUNK: Final = 1 << 20

Counted = Callable[[int], None]
"""Called with the bytes that have come; negative where some must come again."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub describes it, in values that may be anything. Raises ConfigError for what no file has."""

    url: str
    size: int
    sha256: str | None  # of a large file
    git_sha1: str | None  # of a small one, as git names it

    def __post_init__(self) -> None:
        path_part(self.blob, SHA256 if self.sha256 else GIT_SHA1)
        if type(self.size) is not int or not 0 <= self.size <= MAX_FILE:
            raise ConfigError(f"The hub says that {self.url} has {str(self.size)[:40]} bytes, which no file has.")

    @property
    def blob(self) -> str:
        """Its name in the cache."""
        return self.sha256 or self.git_sha1 or ""


def fetch(file: RemoteFile, path: Path, headers: Mapping[str, str], counted: Counted) -> None:
    """Bring the file to `path`, of which the part that an earlier call has left is not fetched again.

    Raises ConfigError for content that is not what the hub says it is, and while another process fetches it; what the
    hub's client raises where it cannot be reached or refuses.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils.tqdm import silent_tqdm

    partial = path.with_name(path.name + PARTIAL)
    with partial.open("ab") as stream:
        if not lock(stream.fileno(), alone=True):
            raise ConfigError(f"{partial} is being written by another process: wait until it has ended.")
        if path.exists():  # another process has just ended with it
            counted(file.size - stream.tell())
            return
        part = _Part(stream, file.size, counted)
        if part.tell() > file.size:  # of another version of the file
            part.seek(0)
            part.truncate()
        # Bytes as they lie there: a range of compressed content is of other bytes.
        asked = {**headers, "Accept-Encoding": "identity"}
        with suppress(_TooLong):
            http_get(
                file.url, cast(BinaryIO, part), resume_size=part.tell(), headers=asked, expected_size=file.size,
                tqdm_class=cast(Any, silent_tqdm),
            )  # fmt: skip
        stream.flush()
        os.fsync(stream.fileno())
        if not _is_right(file, partial):
            partial.unlink()
            raise ConfigError(
                f"{file.url} came with content that is not what the hub says it is, and was thrown away. Try again; if "
                "it happens again, something between here and the hub changes it."
            )
        partial.rename(path)


class _TooLong(Exception):
    """More has come than the file has; its sender may never end."""


class _Part:
    """A file that huggingface_hub appends to: counted, and no longer than it is to be."""

    def __init__(self, stream: BinaryIO, size: int, counted: Counted) -> None:
        self._stream = stream
        self._size = size
        self._counted = counted
        self.seek, self.tell = stream.seek, stream.tell
        self._held = stream.tell()  # bytes

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._count(self._held + len(data))
        if self._held > self._size:
            raise _TooLong

    def truncate(self) -> None:
        """At the position that was sought."""
        self._count(self._stream.truncate())

    def _count(self, held: int) -> None:
        self._counted(held - self._held)
        self._held = held


def _is_right(file: RemoteFile, path: Path) -> bool:
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.blob


# A whole model.


Progress = Callable[[str, int, int], None]
"""Called with the name of the file that is being fetched, and with bytes of all files: those that are here, and all."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is here now."""

    name: str
    revision: str  # the commit
    directory: Path
    size: int  # bytes of its files
    fetched: int  # of them, by this call


class Unreachable(ConfigError):
    """The hub could not be asked: what is here already may do."""


def local(name: HubName) -> Path:
    """The model as an earlier download has left it. Raises ConfigError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
    except Exception as error:  # of several kinds; all say that it is not here
        raise ConfigError(
            f"{name} is neither a directory here nor a model that was downloaded before. Download it with "
            f"`paceline models pull {name}`, or give a directory."
        ) from error


def pull(name: HubName, progress: Progress = lambda *_: None, *, weights: bool = True) -> Pulled:
    """Fetch the newest files of the name's revision, with or without its weights. Raises ConfigError; `Unreachable`
    where the hub cannot serve."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, by its documentation

    revision, files = _remote(name)
    files = {file: remote for file, remote in files.items() if weights or not fnmatch(file, WEIGHTS)}
    folder = Path(constants.HF_HUB_CACHE) / path_part(
        repo_folder_name(repo_id=name.repository, repo_type="model"), FILE
    )
    blobs = folder / "blobs"
    missing = {file: remote for file, remote in files.items() if not _blob(blobs, remote).exists()}
    size = sum(remote.size for remote in files.values())
    done = size - sum(remote.size for remote in missing.values())
    fetched = 0
    _check_room(blobs, size - done - sum(_held(blobs, remote) for remote in missing.values()), name)
    for file, remote in missing.items():
        done += _held(blobs, remote)
        progress(file, done, size)

        def counted(number: int, file: str = file) -> None:
            nonlocal done, fetched
            done, fetched = done + number, fetched + number
            progress(file, done, size)

        with _explained(name):
            blobs.mkdir(parents=True, exist_ok=True)
            fetch(remote, _blob(blobs, remote), build_hf_headers(), counted)
    with _explained(name):
        return Pulled(str(name), revision, _linked(folder, name, revision, files), size, fetched)


def _linked(folder: Path, name: HubName, commit: str, files: Mapping[str, RemoteFile]) -> Path:
    """The folder of a commit, with links to its files, as huggingface_hub lays it out; and the name of the revision.

    huggingface_hub itself would ask the hub again, and take what stands in the answer's headers for names of files.
    """
    snapshot = folder / "snapshots" / path_part(commit, GIT_SHA1)
    snapshot.mkdir(parents=True, exist_ok=True)
    for file, remote in files.items():
        link = snapshot / path_part(file, FILE)
        if link.exists() and link.samefile(_blob(folder / "blobs", remote)):
            continue
        link.unlink(missing_ok=True)
        with suppress(FileExistsError):  # by another process, just now
            link.symlink_to(_blob(Path("..", "..", "blobs"), remote))
    if name.revision != commit:
        label = folder / "refs" / path_part(name.revision or MAIN, REVISION)
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text(commit)
    return snapshot


def remote_size(name: HubName) -> int:
    """Bytes of the model's files at the hub. Raises ConfigError; `Unreachable` where the hub cannot serve."""
    return sum(remote.size for remote in _remote(name)[1].values())


def _remote(name: HubName) -> tuple[str, dict[str, RemoteFile]]:
    """(commit, files by their names) at the hub now. Raises as `pull` does."""
    from huggingface_hub import HfApi, hf_hub_url

    with _explained(name):
        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True, timeout=30.0)
    known = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    found = {}
    for file in wanted_files(name.repository, known):
        sibling = known[file]
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        if sibling.size is None or not (sha256 or sibling.blob_id):
            raise ConfigError(f"The hub does not say what {file} of {name} is: try again later.")
        url = hf_hub_url(name.repository, file, revision=info.sha)
        found[file] = RemoteFile(url, sibling.size, sha256, sibling.blob_id)
    return path_part(info.sha, GIT_SHA1), found


def _blob(blobs: Path, remote: RemoteFile) -> Path:
    return blobs / path_part(remote.blob, SHA256, GIT_SHA1)


def _held(blobs: Path, remote: RemoteFile) -> int:
    """Bytes that an interrupted download has left of a file."""
    partial = _blob(blobs, remote).with_suffix(PARTIAL)
    return partial.stat().st_size if partial.is_file() else 0


def _check_room(folder: Path, needed: int, name: HubName) -> None:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"{name} needs {needed / 1e9:.1f} GB more, and {place} has {free / 1e9:.1f} GB free: remove models with "
            "`paceline models remove`, or set HF_HOME to a larger disk."
        )


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turns the client's errors into sentences. Raises ConfigError."""
    from huggingface_hub import errors

    try:
        yield
    except ConfigError:
        raise
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is given to those alone who have accepted its terms: accept them on its page, {_page(name)}, then "
            "set HF_TOKEN to a token of that account, or run `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{name.repository} has no revision {name.revision}: see {_page(name)}/commits.") from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name.repository} is neither a directory here nor a model on the Hugging Face hub, or it is private: "
            "check the name; for a private one set HF_TOKEN, or run `hf auth login`."
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise ConfigError(
                "The Hugging Face hub does not know the token of HF_TOKEN or `hf auth login`: set a valid one, or none."
            ) from error
        if status < 500 and status not in (408, 429):
            raise ConfigError(
                f"The Hugging Face hub does not give {name} (status {status}): see {_page(name)}."
            ) from error
        limit = ", too many requests of this address or account" if status == 429 else ""
        raise Unreachable(
            f"The Hugging Face hub cannot serve {name} now (status {status}{limit}): try again later."
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise Unreachable(f"{name} is not fetched: HF_HUB_OFFLINE is set.") from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError):  # a full or read-only disk
            raise ConfigError(f"{name} cannot be kept: {error}.") from error
        raise _unreachable(name, error) from error
    except Exception as error:  # of several HTTP libraries: no address, no route, a proxy
        raise _unreachable(name, error) from error


def _unreachable(name: HubName, error: Exception) -> Unreachable:
    proxy = unusable_proxy() if type(error) in (ImportError, ValueError) else ""
    return Unreachable(
        f"{name} cannot be fetched from the Hugging Face hub ({proxy or type(error).__name__}): check the network and "
        "try again, which goes on where it was cut; or give one of `paceline models list`, a folder or a GGUF file."
    )


def _page(name: HubName) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.repository}"
