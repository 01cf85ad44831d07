"""Decoding of OpenAI's token ids to text: the vocabulary `cl100k_base` of its embedding models.

LangChain's OpenAIEmbeddings sends such ids to every server by default. Decoded with another vocabulary they would give
another text, noticed only by bad search results; so they are decoded with this one, or refused. The vocabulary is a
file of PyPI's bpe-openai, which is located but not imported, and used only if its sha256 is the one in OpenAI's
tiktoken.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import RequestError

PACKAGE = "bpe_openai"
FILE = "data/cl100k_base.tiktoken.gz"
SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"  # of the unpacked file
_MAX_BYTES = 4 << 20  # the unpacked file has 1.6 MiB

REMEDY = (
    "Send texts (with LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or install bpe-openai at the "
    "server, and ids of OpenAI's cl100k_base are read."
)


class OpenAIIds:
    """The vocabulary, loaded at first use. Safe to use from several threads."""

    def __init__(self, file: Path | None = None, *, sha256: str = SHA256) -> None:
        """`file` None: that of the installed package."""
        self._file = file
        self._sha256 = sha256
        self._lock = threading.Lock()
        self._tokens: dict[int, bytes] | None = None

    def decode(self, ids: Sequence[int], param: str) -> str:
        """Raises RequestError (400) when the vocabulary is not installed or has no such id."""
        tokens = self._load()
        if not tokens:
            raise RequestError(
                f"{param} holds token ids, and no vocabulary to read them with is installed. {REMEDY}", param=param
            )
        unknown = next((token for token in ids if token not in tokens), None)
        if unknown is not None:
            raise RequestError(f"{param} holds {unknown}, which is no token of cl100k_base. {REMEDY}", param=param)
        return b"".join(tokens[token] for token in ids).decode("utf-8", "replace")

    def _load(self) -> dict[int, bytes]:
        """The vocabulary; empty when there is none."""
        with self._lock:
            if self._tokens is None:
                file = self._file or _installed()
                self._tokens = {} if file is None else _read(file, self._sha256)
            return self._tokens


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / FILE


def _read(file: Path, sha256: str) -> dict[int, bytes]:
    """Parse tiktoken's format: one token per line, its bytes in base64 and its id. Empty for an unknown file."""
    try:
        with gzip.open(file) as stream:
            data = stream.read(_MAX_BYTES)
    except (OSError, EOFError):
        return {}
    if hashlib.sha256(data).hexdigest() != sha256:
        return {}
    pairs = (line.split() for line in data.splitlines())
    return {int(token): base64.b64decode(spelling) for spelling, token in pairs}
