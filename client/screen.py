"""How an answer looks in a terminal: each side's words in its colour, then who read what.

What a model says is text: control characters, which could drive the terminal, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console

from .conversation import Answer

COLOURS = {"cloud": "cyan", "device": "magenta"}  # of a lane; neither: the terminal's own
DEGRADED = {
    "device_lost": "the device was lost in mid-answer; the cloud went on alone",
    "cloud_lost": "the cloud was lost in mid-answer; the device went on alone",
    "device_missing": "no device took part",
    "cloud_missing": "the cloud took no part",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def show(self, pieces: Iterable[tuple[str, str | None]]) -> None:
        """Writes the pieces as they come, and ends the line they made whatever happens."""
        begun = False
        try:
            for text, lane in pieces:
                begun = True
                self._write(text, COLOURS.get(lane or "", ""), end="")
        finally:
            if begun:
                self._console.print()

    def show_sources(self, answer: Answer) -> None:
        """Citations, and whether a side was missing; nothing where there is nothing to say."""
        citations = answer.report.get("citations")
        for number, citation in enumerate(citations if isinstance(citations, list) else [], 1):
            side = str(citation.get("side", ""))
            document = citation.get("document") or "a private document"
            self._write(f"[{number}] {document} ({side})", f"dim {COLOURS.get(side, '')}".strip())
        degraded = answer.report.get("degraded")
        if degraded:
            self._write(f"Note: {DEGRADED.get(str(degraded), degraded)}.", "yellow")
        if answer.finish_reason == "length":
            self._write("Note: cut at the limit of tokens; give more with --max-tokens.", "yellow")

    def say(self, sentence: str) -> None:
        self._write(sentence, "dim")

    def question(self) -> str | None:
        """What the user types next; None at the end of the input."""
        try:
            return self._console.input("> ")
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _write(self, text: str, style: str, end: str = "\n") -> None:
        self._console.print(_CONTROL.sub("", text), style=style, end=end, markup=False, highlight=False, soft_wrap=True)
