"""Folders of models: found by path or by name on the Hugging Face hub, refused unless their weights are safetensors.

For the engine and for cross-encoders. Knows nothing of what a model is for; transformers is imported only to be quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ConfigError
from paceline.hub.download import Unreachable, local, pull
from paceline.hub.names import HubName
from paceline.hub.selection import PICKLED

log = logging.getLogger("paceline.engine")


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
        directory = _from_hub(HubName.parse(str(path_or_name)), download)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} is not a model: it has no config.json. Give a directory saved by transformers.")
    if not any(directory.glob("*.safetensors")):
        pickled = [file.name for pattern in PICKLED for file in directory.glob(pattern)]
        found = f", only {pickled[0]}, and unpickling can run code" if pickled else ""
        raise ConfigError(
            f"{directory} has no *.safetensors weights{found}. "
            "Convert it with save_pretrained, or choose another model."
        )
    return directory


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


def _from_hub(name: HubName, download: bool) -> Path:
    """Folder of a hub model, downloaded where allowed; one that is here already where the hub cannot be reached.

    Raises ConfigError.
    """
    if not download:
        return local(name)
    try:
        return pull(name).directory
    except Unreachable as error:
        try:
            found = local(name)
        except ConfigError:
            raise error from None
        log.warning("%s Until then it is used as it was downloaded before.", error)
        return found
