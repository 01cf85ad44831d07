"""What the scripts of this folder share. Imported in environments that have nothing of this project."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version

MODEL = "demo"
EMBEDDER = "all-MiniLM-L6-v2"
QUESTION = "When does the harbour library of Tarnwick open?"
ANSWER = "8:30"
PLACES = ["harbour", "library"]  # the arguments of the tool, so few that any model can write one


def opens(text: object) -> None:
    """Assert that a text answers QUESTION."""
    assert isinstance(text, str) and ANSWER in text, text


def run(package: str, checks: Mapping[str, Callable[[], object]]) -> None:
    """Run each check, and print the version of a package and what went wrong in each, as one line of JSON."""
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
    sys.stdout.write("\n" + json.dumps({"version": version(package), "checks": found}) + "\n")
