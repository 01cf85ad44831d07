"""The seal of a state folder's answers: stored responses and look-up tables, which say what documents and clients said.

`answers.seal` records under which key they are sealed. It is written once, by the first program that is to encrypt;
from then on all programs of the folder seal. The key is in `answers.key` beside it, or in the keyring: see `store_key`.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from paceline.errors import ConfigError
from paceline.sealing.seal import PLAIN, Seal, StoreSeal
from paceline.sealing.store_key import StoreKey
from paceline.secret_files import read_private, write_private

MARK = "answers.seal"
RESPONSES = "responses.sqlite"
REMOVE = "remove responses.sqlite, tables and answers.seal: they hold past answers only"


def answers_key(state: Path) -> StoreKey:
    """The key of the answers in this state folder."""
    return StoreKey(state / "answers", what="stored responses", anew=REMOVE)


def open_answers_seal(state: Path, *, encrypt: bool) -> Seal:
    """The seal of the answers in this state folder; one is made if there is none and `encrypt` says so.

    Raises ConfigError for a folder whose seal is gone, or was made with a key that is gone, or with another.
    """
    where, mark = answers_key(state), state / MARK
    name = _read(mark)
    if name is None:
        if _has_sealed(state / RESPONSES):  # another seal would not open them, with the same key either
            raise ConfigError(
                f"Stored responses in {state} are encrypted, and {mark}, which says how, is gone: put it back, or "
                f"{REMOVE}. Nothing was changed."
            )
        if not encrypt:
            return PLAIN
        made = StoreSeal.new(where.read_or_make())
        try:
            write_private(mark, made.name.encode(), replace=False)
        except OSError as error:
            raise ConfigError(f"{mark} cannot be written: {error.strerror}. Make that folder writable.") from error
        name = _read(mark)  # another program may have been first
        assert name is not None, "it has just been written"
    key = where.read()
    if key is None:
        raise ConfigError(
            f"Stored responses in {state} are encrypted, and {where.path}, which held their key, is gone: put it back, "
            f"or {REMOVE}. Nothing was changed."
        )
    seal = StoreSeal.of(name, key)
    if seal is None:
        raise ConfigError(
            f"Stored responses in {state} are encrypted with another key than that of {where.path}: put back the file "
            f"that belongs to them, or {REMOVE}. Nothing was changed."
        )
    return seal


def _has_sealed(responses: Path) -> bool:
    """True if this file holds a sealed response. False too for one that cannot be read: who opens it says why."""
    if not responses.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{responses.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return False


def _read(mark: Path) -> str | None:
    content = read_private(mark, otherwise=REMOVE)
    return None if content is None else content.decode("utf-8", "replace")
