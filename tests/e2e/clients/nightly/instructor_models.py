"""instructor: models of pydantic filled in, by tools and by schemas, whole and in parts."""

from __future__ import annotations

import sys
from typing import Literal

import checks
import instructor
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel):
    """A place of the town."""

    name: Literal["harbour", "library"]
    open: bool


url, key = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key)
ASKED = {"model": checks.MODEL, "messages": [{"role": "user", "content": checks.QUESTION}], "max_retries": 0}


def filled(mode: instructor.Mode) -> None:
    place = instructor.from_openai(client, mode=mode).create(response_model=Place, **ASKED)
    assert isinstance(place, Place)


def partial() -> None:
    *_, last = instructor.from_openai(client, mode=instructor.Mode.TOOLS).create_partial(response_model=Place, **ASKED)
    assert last.name in checks.PLACES and isinstance(last.open, bool)


checks.run(
    "instructor",
    {
        "tools": lambda: filled(instructor.Mode.TOOLS),
        "tools strict": lambda: filled(instructor.Mode.TOOLS_STRICT),
        "json schema": lambda: filled(instructor.Mode.JSON_SCHEMA),
        "partial stream": partial,
    },
)
