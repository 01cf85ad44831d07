"""Kinds of documents by the end of a file's name, and the limits of reading one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Literal, get_args

Kind = Literal[
    "text", "markdown", "code", "log", "csv", "json", "xml", "html", "pdf", "docx", "pptx", "epub",
    "xlsx", "odt", "rtf", "eml", "ipynb", "ics", "srt",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_FILE_BYTES = 64 * 2**20
MAX_TEXT_BYTES = 10 * 2**20  # UTF-8; a text of 10 MiB has about 4,000 pages
MAX_TITLE = 120  # characters; a longer first line is a paragraph
MAX_PAGES = 10_000
FULL_STOPS = "\u3002\uff01\uff1f"  # Chinese and Japanese . ! ?
_BASE_CPU_S, _CPU_S_PER_MIB = 15, 5  # of time to parse; most documents need less than a second
EMPTY = "is empty; write something in it or leave it out"  # what is said of such a document, after its name
MAX_REASON = 400  # characters of the sentence that says why a document cannot be read


@dataclass(frozen=True, slots=True)
class Limits:
    """What the process that parses one document may use."""

    memory_bytes: int = 2**30  # of address space
    cpu_s: int = 60
    wall_s: int = 300  # much more than cpu_s: a busy machine is not the document's fault

    def for_size(self, num_bytes: int) -> Limits:
        """What a document of this size may use: a small one has less time."""
        return replace(self, cpu_s=min(self.cpu_s, _BASE_CPU_S + _CPU_S_PER_MIB * num_bytes // 2**20))


_ENDS: Mapping[Kind, str] = {  # of files' names
    "text": "txt rst adoc",
    "markdown": "md markdown org",
    "code": "bash bat bib c cc cfg clj conf cpp cs css cxx dart diff erl ex exs go gradle graphql h hpp hrl hs ini "
    "java js jsx kt kts less lua m mjs ml mm patch php pl pm proto ps1 py pyi r rb rs sass scala scss sh sql svelte "
    "swift tcl tex tf toml ts tsx vb vue yaml yml zig zsh",
    "log": "log",
    "csv": "csv tsv",
    "json": "json jsonl",
    "xml": "xml atom gpx kml rss tmx",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "docx": "docx docm",
    "pptx": "pptx pptm ppsx",
    "epub": "epub",
    "xlsx": "xlsx xlsm xlsb xls ods",
    "odt": "odt odp",
    "rtf": "rtf",
    "eml": "eml mbox",
    "ipynb": "ipynb",
    "ics": "ics vcf",
    "srt": "srt vtt",
}
SUFFIXES: Mapping[str, Kind] = {f".{end}": kind for kind, ends in _ENDS.items() for end in ends.split()}
NAMED_KINDS = (  # for people
    "text, Markdown, PDF, HTML, DOCX, PPTX, XLSX, ODT, ODP, RTF, EPUB, EML, MBOX, ICS, VCF, SRT, CSV, JSON, XML, IPYNB "
    "or source code"
)


def kind_of(name: str) -> Kind | None:
    """The kind that a file's name claims; None: its content has to tell."""
    return SUFFIXES.get(PurePath(name).suffix.lower())


_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)(.*)")


def fence_after(line: str, fence: str) -> str:
    """The fence of the block of code that a line begins or goes on with (CommonMark 4.5); "" outside of one. fence:
    before the line."""
    match = _FENCE.match(line)
    if match is None:
        return fence
    mark, rest = match.groups()
    if not fence:
        return "" if "`" in mark and "`" in rest else mark
    return "" if mark.startswith(fence) and not rest.strip() else fence
