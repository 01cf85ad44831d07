"""A model from the Hugging Face hub, into the hub's own cache, where every program of this machine finds it.

Files that are there already are not fetched again, nor parts of them. Refusals are sentences that say what to do.
`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` hold, as for every program that uses huggingface_hub.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.hub.names import FILE, GIT_SHA1, MAIN, REVISION, SHA256, HubName, path_part
from paceline.hub.selection import wanted_files
from paceline.hub.transfer import PARTIAL, RemoteFile, asked_wait, fetch

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

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


def pull(name: HubName, progress: Progress = lambda *_: None) -> Pulled:
    """Fetch the newest files of the name's revision. Raises ConfigError; `Unreachable` where the hub cannot serve."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, by its documentation

    revision, files = _remote(name)
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
    return path_part(info.sha, GIT_SHA1), _files(
        name, info, lambda file: hf_hub_url(name.repository, file, revision=info.sha)
    )


def _files(name: HubName, info: ModelInfo, url: Callable[[str], str]) -> dict[str, RemoteFile]:
    """Files of the model by their names."""
    known = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    found = {}
    for file in wanted_files(name.repository, known):
        sibling = known[file]
        sha256 = None if sibling.lfs is None else sibling.lfs.sha256
        if sibling.size is None or not (sha256 or sibling.blob_id):
            raise ConfigError(f"The hub does not say what {file} of {name} is: try again later.")
        found[file] = RemoteFile(url(file), sibling.size, sha256, sibling.blob_id)
    return found


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
        wait = asked_wait(error)
        when = f"in {wait:g} s" if wait else "later"
        limit = ", too many requests of this address or account" if status == 429 else ""
        raise Unreachable(
            f"The Hugging Face hub cannot serve {name} now (status {status}{limit}): try again {when}."
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
    return Unreachable(
        f"{name} cannot be fetched from the Hugging Face hub ({type(error).__name__}): check the network and try "
        "again, which goes on where it was cut; or give a directory."
    )


def _page(name: HubName) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name.repository}"
