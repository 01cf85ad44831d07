"""Readers: the bytes of one kind of document to a `Content`, in the parser process.

Each module has `read(data, name) -> Content`, and raises `UnreadableError` with a sentence for the user; any other
error means that the document is damaged. They trust the process around them to end what takes too long or too much.

`content`: the result, and the text under construction. `decoding`: character sets. `sniffing`: kinds by content.
`archive`: zip containers. `plain`: text, Markdown and code. `table`: CSV. `records`: JSON and notebooks. `markup`:
HTML, and the trees of `office`: DOCX, PPTX, ODT. `sheets`: spreadsheets. `mail`, `pdf`, `rtf`, `epub`.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.rag.parsing.kinds import Kind

MODULES: Mapping[Kind, str] = {
    "text": "plain",
    "markdown": "plain",
    "code": "plain",
    "csv": "table",
    "json": "records",
    "html": "markup",
    "pdf": "pdf",
    "docx": "office",
    "pptx": "office",
    "epub": "epub",
    "xlsx": "sheets",
    "odt": "office",
    "rtf": "rtf",
    "eml": "mail",
    "ipynb": "records",
}
