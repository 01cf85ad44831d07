"""Generator of paceline/api/official.json: `python -m lab.client_shapes > paceline/api/official.json`.

Reads the types of OpenAI's client that routes name; a test fails when the file is stale.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from lab.openapi import sample
from paceline.api.http.auth import Keyring
from paceline.api.openapi import Json, official_names, outline, schemas_of

_PREFIX: Final = "openai."  # some of whose names are also ours
_LIST: Final = re.compile(r"(SyncPage|SyncCursorPage)\[([\w.]+)\]")


def text() -> str:
    """The file's content."""
    with tempfile.TemporaryDirectory() as directory, sample(Path(directory), Keyring({})) as (_, app):
        names = sorted(official_names(outline(app)))
    shapes, schemas = schemas_of({name: _type(name) for name in names}, "serialization", _PREFIX)
    content = {"shapes": shapes, "schemas": {name: _bare(schema) for name, schema in schemas.items()}}
    return json.dumps(content, indent=0, separators=(",", ":"), ensure_ascii=False) + "\n"


def _type(shape: str) -> Any:
    """The client's type, such as `chat.ChatCompletion` or `SyncPage[Model]`."""
    if found := _LIST.fullmatch(shape):
        return getattr(importlib.import_module("openai.pagination"), found[1])[_type(found[2])]
    module, _, name = f"types.{shape}".rpartition(".")
    return getattr(importlib.import_module(f"openai.{module}"), name)


def _bare(schema: Json) -> Json:
    """A schema without descriptions and titles."""
    return {
        key: {name: _bare(each) for name, each in value.items()} if key == "properties" else _bared(value)
        for key, value in schema.items()
        if key not in ("description", "title")
    }


def _bared(value: Any) -> Any:
    if isinstance(value, dict):
        return _bare(value)
    return [_bared(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.stdout.write(text())
