"""PPTX by python-pptx: the text of each slide, and where each begins, with its tables and the speaker's notes.

Not handled: text in pictures, charts and SmartArt; the order is that in which shapes lie on top of each other.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import pptx
from pptx.shapes.autoshape import Shape
from pptx.shapes.base import BaseShape
from pptx.shapes.graphfrm import GraphicFrame
from pptx.shapes.group import GroupShape
from pptx.slide import Slide

from paceline.rag.parsing.kinds import MAX_PAGES
from paceline.rag.parsing.readers.archive import open_archive
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError, one_line

_MAX_DEPTH = 8  # of groups in groups


def read(data: bytes, name: str) -> Content:
    del name
    open_archive(data)  # it is judged before python-pptx unpacks it
    presentation = pptx.Presentation(io.BytesIO(data))
    out = TextBuilder()
    title = one_line(presentation.core_properties.title or "")
    if title.lower() == "powerpoint presentation":  # what programs make up
        title = ""
    starts: list[int] = []
    for slide in presentation.slides:
        if len(starts) == MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,} slides; split it into smaller files", "invalid_file")
        starts.append(out.num_characters + 2 if out.num_characters else 0)  # after the break that comes first
        heading = _write_slide(slide, out)
        title = title or heading
    whole = out.build()
    if not whole:
        raise UnreadableError("has no text; if its slides are images, recognise their text first and save that as PDF")
    return Content(title, whole, tuple(min(start, len(whole)) for start in starts))


def _write_slide(slide: Slide, out: TextBuilder) -> str:
    """Append a slide's text, and return its title."""
    heading = slide.shapes.title
    title = "" if heading is None else one_line(heading.text_frame.text)
    out.paragraph("# " if title else "")
    out.text(title)
    for shape in _shapes(slide.shapes, 0):
        if title and heading is not None and shape.shape_id == heading.shape_id:
            continue
        _write_shape(shape, out)
    if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
        out.paragraph()
        _write_lines(slide.notes_slide.notes_text_frame.text, out)
    return title


def _shapes(shapes: Iterable[BaseShape], depth: int) -> Iterator[BaseShape]:
    for shape in shapes:
        if isinstance(shape, GroupShape):
            if depth < _MAX_DEPTH:
                yield from _shapes(shape.shapes, depth + 1)
        else:
            yield shape


def _write_shape(shape: BaseShape, out: TextBuilder) -> None:
    if isinstance(shape, GraphicFrame) and shape.has_table:
        out.paragraph()
        for row in shape.table.rows:
            out.line()
            out.text(" | ".join(" ".join(cell.text.split()) for cell in row.cells))
    elif isinstance(shape, Shape) and shape.has_text_frame:
        out.paragraph()
        _write_lines(shape.text_frame.text, out)


def _write_lines(text: str, out: TextBuilder) -> None:
    for line in text.replace("\v", "\n").split("\n"):
        out.line()
        out.text(line)
