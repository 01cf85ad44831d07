"""Names of models on the Hugging Face hub, with a revision behind an `@`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline.errors import ConfigError

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
    """Raises ConfigError for what other programs run and this one does not."""
    if name.lower().endswith(".gguf") or "-gguf" in name.lower():
        raise ConfigError(
            f"{name} names a model in GGUF, which is not read: give the same model with safetensors, as a Hugging Face "
            "name such as Qwen/Qwen2.5-0.5B-Instruct or a directory."
        )
    if _OLLAMA_NAME.fullmatch(name) and not name.startswith("fake:"):
        raise ConfigError(
            f"{name} reads like a name of Ollama, whose models are GGUF and are not read: give the same model as a "
            "Hugging Face name such as Qwen/Qwen2.5-0.5B-Instruct, or a directory with safetensors."
        )
