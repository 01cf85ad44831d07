"""The recording of a terminal in the README: `python -m bench.terminal` asks the demonstration with `paceline chat` and
writes what it shows, as it came, to docs/images/terminal.svg."""

from __future__ import annotations

import os
import pty
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from paceline.commands.demo import Children, command, start_pair
from paceline.core.side import Side
from paceline.models import SAMPLES

QUESTION: Final = "What is the password for our wifi and who is the captain of the ferry Marabel?"
FILE: Final = Path(__file__).parents[1] / "docs/images/terminal.svg"
ADVANCE, LINE, LEFT, TOP = 12.2, 24.4, 10.0, 62.0  # px
FRAME: Final = """\
<svg viewBox="0 0 {width:.0f} {height:.0f}" xmlns="http://www.w3.org/2000/svg">
<style>
text {{ font: 20px monospace; fill: #c5c8c6; white-space: pre }}
.dim {{ fill-opacity: .65 }}
@media (prefers-reduced-motion: no-preference) {{ tspan {{ animation: shown 1ms backwards }} }}
@keyframes shown {{ from {{ visibility: hidden }} }}
</style>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<circle cx="24" cy="22" r="7" fill="#ff5f57"/><circle cx="46" cy="22" r="7" fill="#febc2e"/>
<circle cx="68" cy="22" r="7" fill="#28c840"/>
{lines}
</svg>
"""
COLOURS: Final = {6: "#68a0b3", 5: "#c08fc8"}  # of ANSI: cyan, magenta
Piece = tuple[float, str, str]  # seconds from the beginning, text, attributes


def recorded(arguments: Sequence[str], environment: dict[str, str]) -> Iterator[tuple[float, str]]:
    """What a program has written to a terminal of its own, each time that there was more, with the seconds from the
    first word on."""
    ours, its = pty.openpty()
    with subprocess.Popen(arguments, stdin=its, stdout=its, env=environment) as process:
        os.close(its)
        written, start = b"", 0.0
        while True:
            try:
                written += os.read(ours, 65536)
            except OSError:  # it has ended
                break
            start = start or time.monotonic()
            yield time.monotonic() - start, written.decode(errors="ignore").replace("\r\n", "\n")
        os.close(ours)
    assert process.returncode == 0


def pieces(frames: Iterator[tuple[float, str]]) -> list[Piece]:
    """The last frame in stretches of one style that came together."""
    found: list[Piece] = []
    console, before = Console(), 0
    for seconds, frame in frames:
        whole = Text.from_ansi(frame)
        for at in range(before, len(whole)):
            style = whole.get_style_at_offset(console, at)
            colour = COLOURS.get((style.color and style.color.number) or 0)
            look = (f' fill="{colour}"' if colour else "") + (' class="dim"' if style.dim else "")
            if found and found[-1][0] == seconds and found[-1][2] == look and whole.plain[at] != "\n":
                found[-1] = (seconds, found[-1][1] + whole.plain[at], look)
            else:
                found.append((seconds, whole.plain[at], look))
        before = len(whole)
    return found


def drawn(shown: Sequence[Piece]) -> str:
    lines: list[list[Piece]] = [[]]
    for seconds, text, look in shown:
        if text.startswith("\n"):
            lines.append([])
        if rest := text.removeprefix("\n"):
            lines[-1].append((seconds, rest, look))
    widths = [sum(len(text) for _, text, _ in line) for line in lines]
    rows = []
    for row, line in enumerate(lines):
        spans = (
            f'<tspan style="animation-delay:{1 + seconds:.2f}s"{look}>{escape(text)}</tspan>'
            for seconds, text, look in line
        )
        place = f'x="{LEFT}" y="{TOP + LINE * row:.1f}" textLength="{ADVANCE * widths[row]:.1f}"'
        rows.append(f"<text {place}>{''.join(spans)}</text>" if line else "")
    width = 2 * LEFT + ADVANCE * max(widths)
    return FRAME.format(width=width, height=TOP + LINE * len(lines), lines="\n".join(filter(None, rows)))


def main() -> None:
    documents: dict[Side, Path] = {"cloud": SAMPLES / "public", "device": SAMPLES / "private"}
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        pair = start_pair(children, documents, model="demo", embedder="minilm", device="laptop")
        asked = command("chat", QUESTION, "--url", pair.device.url)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
        found = pieces(recorded(asked, environment))
    typed: Piece = (-1.0, f'$ paceline chat "{QUESTION}"', "")
    FILE.write_text(drawn([typed, (0.0, "\n", ""), *found]), "utf-8")


if __name__ == "__main__":
    main()
