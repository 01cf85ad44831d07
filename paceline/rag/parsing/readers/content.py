"""What a reader returns, and a text under construction that cannot outgrow its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.rag.parsing.kinds import MAX_TEXT_BYTES, MAX_TITLE

# Letters of one sign, as fonts draw them, and hyphens that are shown at a line's end alone.
LIGATURES = str.maketrans({
    "\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl", "\ufb05": "st", "\ufb06": "st",
    "\u00ad": "",
})  # fmt: skip
FailureCode = Literal["unsupported_file", "invalid_file"]  # OpenAI's, in `last_error` of a vector store's file


class UnreadableError(Exception):
    """A document that cannot be read. The message follows the document's name: "is empty; leave it out"."""

    def __init__(self, reason: str, code: FailureCode = "unsupported_file") -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code


@dataclass(frozen=True, slots=True)
class Content:
    """A document's text. `pages`: where each page begins in it; empty for kinds without pages."""

    title: str
    text: str
    pages: tuple[int, ...] = ()


def too_long() -> UnreadableError:
    return UnreadableError(
        f"has a text larger than {MAX_TEXT_BYTES // 2**20} MiB; split it into smaller files", "invalid_file"
    )


def one_line(text: str) -> str:
    """A title from a text with any blanks; "" when it is too long to be one."""
    line = " ".join(text[: 16 * MAX_TITLE].split())
    return line if len(line) <= MAX_TITLE else ""


class TextBuilder:
    """Paragraphs, headings and rows as Markdown. Runs of blanks become one; breaks are written before the next text."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._size = 0  # characters
        self._newlines = 0  # to write before the next text
        self._blank = False  # a blank to write before the next text
        self._mark = ""  # of a heading or list item, to write before the next text

    @property
    def num_characters(self) -> int:
        return self._size

    def text(self, text: str) -> None:
        """Append running text."""
        words = (text if text.isascii() else text.translate(LIGATURES)).split()
        if not words:
            self._blank = self._blank or bool(text)
            return
        self._blank = self._blank or text[0].isspace()
        self._put(" ".join(words))
        self._blank = text[-1].isspace()

    def verbatim(self, text: str) -> None:
        """Append text whose blanks and line ends mean something."""
        if text:
            self._put(text)

    def line(self, mark: str = "") -> None:
        """Begin a line, with a mark if any text follows."""
        self._begin(1, mark)

    def paragraph(self, mark: str = "") -> None:
        """Begin a paragraph, with a mark if any text follows."""
        self._begin(2, mark)

    def build(self) -> str:
        return "".join(self._parts)

    def _begin(self, newlines: int, mark: str) -> None:
        self._newlines = max(self._newlines, newlines)
        self._blank = False
        self._mark = mark

    def _put(self, text: str) -> None:
        before = "\n" * self._newlines if self._parts else ""
        if not before and self._blank and self._parts:
            before = " "
        piece = f"{before}{self._mark}{text}"
        self._newlines, self._blank, self._mark = 0, False, ""
        self._size += len(piece)
        if self._size > MAX_TEXT_BYTES:
            raise too_long()
        self._parts.append(piece)
