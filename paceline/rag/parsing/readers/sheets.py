"""Spreadsheets by calamine: each visible sheet under its name, a line for each of its rows.

Row n of a sheet is line n after its heading, empty ones included. Not handled: formats of numbers, notes of cells,
charts.
"""

from __future__ import annotations

import io
from datetime import datetime

from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum, SheetVisibleEnum

from paceline.rag.parsing.kinds import MAX_TEXT_BYTES
from paceline.rag.parsing.readers.archive import open_archive
from paceline.rag.parsing.readers.content import Content, UnreadableError, too_long
from paceline.rag.parsing.readers.table import named_rows


def read(data: bytes, name: str) -> Content:
    del name
    if data.startswith(b"PK"):
        open_archive(data)  # it is judged before calamine unpacks it
    try:
        workbook = CalamineWorkbook.from_filelike(io.BytesIO(data))
    except PasswordError:
        raise UnreadableError("is protected by a password; save a copy without one") from None
    except CalamineError:
        raise UnreadableError("is a damaged spreadsheet; save or download it again", "invalid_file") from None
    lines: list[str] = []
    size = 0
    for sheet in workbook.sheets_metadata:
        if sheet.typ is not SheetTypeEnum.WorkSheet or sheet.visible is not SheetVisibleEnum.Visible:
            continue
        rows = workbook.get_sheet_by_name(sheet.name).iter_rows()
        before = ["", f"# {' '.join(sheet.name.split())}"]
        for line in named_rows(([_shown(cell) for cell in row] for row in rows), with_names=True):
            lines += [*before, line]
            size += len(line) + 1
            before = []
            if size > MAX_TEXT_BYTES:
                raise too_long()
    if not any(line and not line.startswith("# ") for line in lines):
        raise UnreadableError("has no text in its sheets; if it holds images or charts, save it as PDF")
    return Content("", "\n".join(lines).strip("\n"))


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.15g}"  # as spreadsheets show what is no fraction exactly
    return cell.isoformat(" ", "seconds") if isinstance(cell, datetime) else str(cell)
