"""Readers: the bytes of one kind of document to a `ReadText`, in the parser process.

A reader is a function `(data, name) -> ReadText`, and raises `UnreadableError` with a sentence for the user; any other
error means that the document is damaged. They trust the process around them to end what takes too long or too much.

content   the result, the text under construction, character sets, kinds by content, zip containers
text      text, Markdown, code, CSV, JSON and notebooks
markup    HTML, EPUB and XML, and the trees of `office`
office    DOCX, PPTX, ODT, ODP, and spreadsheets
mail      messages with their parts, and mailboxes
entries   calendars, contacts, subtitles
pdf       PDF
rtf       RTF

Libraries beyond Python's own are those of the extra `documents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from paceline.rag.parsing.kinds import Kind
from paceline.rag.parsing.readers.content import ReadText, UnreadableError

READERS: Mapping[Kind, tuple[str, str]] = {  # module and function
    "text": ("text", "read_text"),
    "markdown": ("text", "read_text"),
    "code": ("text", "read_text"),
    "log": ("text", "read_text"),
    "csv": ("text", "read_table"),
    "json": ("text", "read_records"),
    "xml": ("markup", "read_xml"),
    "html": ("markup", "read_html"),
    "pdf": ("pdf", "read_pdf"),
    "docx": ("office", "read_office"),
    "pptx": ("office", "read_office"),
    "epub": ("markup", "read_book"),
    "xlsx": ("office", "read_sheets"),
    "odt": ("office", "read_office"),
    "rtf": ("rtf", "read_rtf"),
    "eml": ("mail", "read_mail"),
    "ipynb": ("text", "read_records"),
    "ics": ("entries", "read_entries"),
    "srt": ("entries", "read_subtitles"),
}


def reader(kind: Kind) -> Callable[[bytes, str], ReadText]:
    """The reader of a kind. Raises UnreadableError where its library is not installed."""
    module, function = READERS[kind]
    try:
        return cast(Callable[[bytes, str], ReadText], getattr(import_module(f"{__name__}.{module}"), function))
    except ImportError as error:
        if kind == "xml":
            return reader("code")  # as it is
        raise missing_library(error) from None


def missing_library(error: ImportError) -> UnreadableError:
    library = (error.name or "a library").partition(".")[0]
    return UnreadableError(f"is read with {library}, which is not installed: pip install 'paceline[documents]'")
