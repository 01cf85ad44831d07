"""Answers in a terminal: each side's words in its colour, then the citations.

Control characters in a model's text, which could control the terminal, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from paceline.core.printable import printable, printable_lines

from .conversation import Answer

COLOURS = {"cloud": "cyan", "device": "magenta"}  # by lane; text without a lane has the terminal's colour
DEGRADED = {
    "device_lost": "the device was lost in mid-answer; the cloud went on alone",
    "cloud_lost": "the cloud was lost in mid-answer; the device went on alone",
    "device_missing": "no device took part",
    "cloud_missing": "the cloud took no part",
    "device_refused": "the device did not take part",
    "cloud_refused": "the cloud did not take part",
}


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()

    def show(self, pieces: Iterable[tuple[str, str | None]]) -> None:
        """Write the pieces as they arrive; if any was written, end the line even after an error."""
        begun = False
        try:
            for text, lane in pieces:
                begun = True
                self._write(text, COLOURS.get(lane or "", ""), end="")
        finally:
            if begun:
                self._console.print()

    def show_sources(self, answer: Answer) -> None:
        """Write citations, a missing side and a cut-off at the token limit, where there are any."""
        citations = answer.report.get("citations")
        for number, citation in enumerate(citations if isinstance(citations, list) else [], 1):
            if not isinstance(citation, dict):
                continue
            side = str(citation.get("side", ""))
            document = citation.get("document") or "a private document"
            # On one line: a name must not pass for a further source.
            self._write(printable(f"[{number}] {document} ({side})"), f"dim {COLOURS.get(side, '')}".strip())
        degraded = answer.report.get("degraded")
        if degraded:
            why = f": {answer.report.get('why')}" if str(degraded).endswith("_refused") else ""
            self._write(printable(f"Note: {DEGRADED.get(str(degraded), degraded)}{why}."), "yellow")
        if answer.finish_reason == "length":
            self._write("Note: cut at the limit of tokens; give more with --max-tokens.", "yellow")

    def say(self, sentence: str) -> None:
        self._write(sentence, "dim")

    def show_legend(self) -> None:
        """Write which side's words have which colour; nothing where there are no colours."""
        if self._console.color_system is None:
            return
        for side, colour in COLOURS.items():
            self._write(f"words from the {side}'s documents  ", colour, end="")
        self._console.print()

    def _write(self, text: str, style: str, end: str = "\n") -> None:
        self._console.print(printable_lines(text), style=style, end=end, markup=False, highlight=False, soft_wrap=True)
