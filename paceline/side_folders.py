"""Folders that are named once for both sides: each side uses its own below it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.core.side import SIDES, Side
from paceline.errors import ConfigError

FOLDERS: Final[Mapping[str, tuple[str, ...]]] = {  # settings that name one, and files of a side
    "state_dir": ("keys.sqlite", "devices.sqlite", "responses.sqlite", "credentials.json", "docs/documents.sqlite"),
    "docs_dir": ("documents.sqlite",),
}


def own_folder(side: Side, key: str, value: object, origin: str) -> object:
    """This side's subfolder of a folder named for both sides.

    Raises ConfigError if files of a side lie in that folder itself, as one has them that was named for it alone before.
    """
    if not isinstance(value, str):
        return value  # the schema rejects it
    folder = Path(value).expanduser()
    for name in FOLDERS[key]:
        if (folder / name).exists():
            homes = " or ".join(str(folder / each) for each in SIDES)
            raise ConfigError(
                f"{key} = {value!r} ({origin}) is for both sides, each in a folder of its own below it, but "
                f"{folder / name} is there: stop the programs and move what is in {folder} to {homes}, by whose it is."
            )
    return str(folder / side)
