"""Reading files in, as work of whatever processing units a node has. Knows none of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class FileWork(Protocol):
    """Contexts around the two parts of it that compute."""

    def indexing(self) -> AbstractContextManager[None]:
        """Entered for each turn, by the thread that embeds."""

    def parsing(self) -> AbstractContextManager[None]:
        """Entered by the thread that waits for a parser, and starts it if it has to."""


class Anywhere:
    """No units are known."""

    def indexing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def parsing(self) -> AbstractContextManager[None]:
        return nullcontext()
