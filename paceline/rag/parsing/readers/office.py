"""DOCX, PPTX and ODT: what their XML amounts to as HTML, written as HTML is; and spreadsheets, by calamine.

Whatever stands in a document and is not deleted is text, wherever it is wrapped: insertions, controls, fields, text
boxes, tables in tables, notes, comments, headers, charts, diagrams. Not handled: characters of symbol fonts, the
numbers that programs compute for lists and headings, masters of slides, text in pictures.
"""

from __future__ import annotations

import io
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from datetime import datetime
from email import message_from_bytes
from email.policy import default
from typing import NamedTuple
from zipfile import ZipFile

from lxml import etree

from paceline.rag.parsing.kinds import MAX_PAGES, MAX_TEXT_BYTES, kind_of
from paceline.rag.parsing.readers import reader
from paceline.rag.parsing.readers.content import (
    NO_TEXT,
    ReadText,
    TextBuilder,
    UnreadableError,
    kind_by_content,
    member,
    one_line,
    open_archive,
    too_long,
)
from paceline.rag.parsing.readers.mail import write_part
from paceline.rag.parsing.readers.markup import write_tree, xml_member
from paceline.rag.parsing.readers.text import named_rows

_MADE_UP = "powerpoint presentation"  # a title of programs
_OFF = ("0", "false", "off", "none")
# Elements by their local names, which the Strict and the Transitional format share. First what is no text any more,
# or never was; then what only wraps; then what has a counterpart in HTML.
_GONE = (
    *("del", "moveFrom", "delText", "instrText", "fldData", "pPr", "rPr", "tblPr", "tblGrid", "trPr", "tcPr"),
    *("tblPrEx", "sdtPr", "sdtEndPr", "sectPr", "endParaRPr"),
)
_WRAPPERS = (
    *("sdt", "sdtContent", "ins", "moveTo", "customXml", "smartTag", "hyperlink", "fldSimple", "bdo", "dir"),
    *("AlternateContent", "Choice", "Fallback"),
)
_TAGS: Mapping[str, str] = {
    "tbl": "table", "tr": "tr", "tc": "td", "br": "br", "cr": "br", "txBody": "div", "hdr": "header", "ftr": "footer",
    "txbxContent": "aside", "footnote": "aside", "endnote": "aside", "comment": "aside", "ser": "p", "cat": "line",
    "val": "line", "xVal": "line", "yVal": "line", "rich": "div", "graphicFrame": "div", "chartSpace": "aside",
    "dataModel": "aside", "pt": "span",
}  # fmt: skip
_SIGNS: Mapping[str, str] = {"tab": " ", "ptab": " ", "noBreakHyphen": "-", "den": "/", "sup": "^", "sub": "_"}
_NOTES: Mapping[str, tuple[str, str]] = {  # of references: the notes' element, and what is said before them
    "footnoteReference": ("footnote", "Note: "),
    "endnoteReference": ("endnote", "Note: "),
    "commentReference": ("comment", "Comment: "),
}


def read_office(data: bytes, _name: str) -> ReadText:
    archive = open_archive(data)
    if "content.xml" in archive.namelist():
        return _open_document(archive)
    package = _Package(archive)
    root_parts = list(package.related(""))
    main = next((part for _, kind, part in root_parts if kind == "officeDocument"), "word/document.xml")
    core = next((part for _, kind, part in root_parts if kind == "core-properties"), "")
    named = package.xml(core).findtext("{*}title") if core in archive.namelist() else ""
    title = one_line(named or "")
    out = TextBuilder()
    starts: tuple[int, ...] = ()
    if main.startswith("ppt/"):
        starts, found = _write_slides(package, main, out)
        title = found if not title or title.lower() == _MADE_UP else title
    else:
        found = _write_document(package, main, out)
        title = title or found
    whole = out.build(NO_TEXT)
    return ReadText(title, whole, tuple(min(start, len(whole)) for start in starts))


class _Package:
    """Parts of an archive, and what relates them (Open Packaging Conventions)."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._names = frozenset(archive.namelist())

    def xml(self, part: str) -> etree._Element:
        return xml_member(self._archive, part)

    def document(self, part: str) -> str:
        """The text of a part that is a document or a web archive (MHTML); of one that is not read, why not."""
        data = member(self._archive, part)
        if part.lower().endswith((".mht", ".mhtml")):
            out = TextBuilder()
            write_part(message_from_bytes(data, policy=default), out)
            return out.build()
        name = posixpath.basename(part)
        try:
            kind = kind_by_content(data, kind_of(part))
            return reader(kind)(data, name).text
        except UnreadableError as error:
            return f"({name} {error.reason})"

    def related(self, part: str) -> Iterator[tuple[str, str, str]]:
        """(id, kind, path) of the parts that a part refers to."""
        folder, base = posixpath.split(part)
        relations = posixpath.join(folder, "_rels", f"{base}.rels")
        for each in self.xml(relations) if relations in self._names else ():
            target = posixpath.normpath(posixpath.join("/", folder, each.get("Target", "")))[1:]
            if target in self._names:
                yield each.get("Id", ""), each.get("Type", "").rpartition("/")[2], target

    def of_kind(self, part: str, kind: str) -> Iterator[etree._Element]:
        return (self.xml(target) for _, found, target in self.related(part) if found == kind)


class _Style(NamedTuple):
    heading: int = 0  # its level; 0: none
    is_list: bool = False
    is_hidden: bool = False


# ---- DOCX -----------------------------------------------------------------------------------------------------------
def _write_document(package: _Package, main: str, out: TextBuilder) -> str:
    """Append a document between its headers and footers, and return its title."""
    styles = {}
    for root in package.of_kind(main, "styles"):
        styles = _styles(root)
    notes = {
        (kind, _attribute(note, "id")): note
        for part, kind in (("footnotes", "footnote"), ("endnotes", "endnote"), ("comments", "comment"))
        for root in package.of_kind(main, part)
        for note in root.iterfind(f"{{*}}{kind}")
        if _attribute(note, "type") in ("", "normal")
    }
    body = package.xml(main)
    title = next((p for p in body.iter("{*}p") if _style_name(p) == "Title"), None)
    shown = "" if title is None else one_line("".join(title.itertext("{*}t")))
    parts = [(kind, target) for _, kind, target in package.related(main) if kind in ("header", "footer")]
    ends = {kind: [package.xml(target) for found, target in parts if found == kind] for kind in ("header", "footer")}
    _write_once(ends["header"], styles, out)
    _write_word(package, main, body, styles, notes, out)
    _write_once(ends["footer"], styles, out)
    return shown


def _write_once(roots: Iterable[etree._Element], styles: Mapping[str, _Style], out: TextBuilder) -> None:
    """Append headers or footers, each once though several kinds of pages have it."""
    known = set()
    for root in roots:
        if (text := "".join(root.itertext("{*}t"))) not in known and any(map(str.isalpha, text)):
            known.add(text)
            _write_word(None, "", root, styles, {}, out)


def _write_word(
    package: _Package | None,
    part: str,
    root: etree._Element,
    styles: Mapping[str, _Style],
    notes: dict[tuple[str, str], etree._Element],
    out: TextBuilder,
) -> None:
    for reference in reversed(list(root.iter(*(f"{{*}}{name}" for name in _NOTES)))):
        kind, label = _NOTES[_local(reference)]
        note = notes.pop((kind, _attribute(reference, "id")), None)
        paragraph = next(reference.iterancestors("{*}p"), None)
        is_gone = next(reference.iterancestors("{*}del", "{*}moveFrom"), None) is not None
        if note is not None and paragraph is not None and not is_gone:
            first = next(note.iter("{*}p"), note)
            first.insert(0, _span(label))
            paragraph.addnext(note)
    targets = {} if package is None else {relation: target for relation, _, target in package.related(part)}
    for chunk in list(root.iter("{*}altChunk")):  # another document, which Word shows in its place
        target = targets.get(_attribute(chunk, "id"))
        for block in package.document(target).split("\n\n") if package is not None and target else ():
            paragraph = etree.Element("p")
            for line in block.split("\n"):
                paragraph.extend([_span(line), etree.Element("br")])
            chunk.addprevious(paragraph)
    for choice in root.iter("{*}ddList"):  # a field whose text is the number of an entry
        entries = [_attribute(entry, "val") for entry in choice.iterfind("{*}listEntry")]
        chosen = choice.find("{*}result")
        number = "0" if chosen is None else _attribute(chosen, "val")
        if number.isdecimal() and int(number) < len(entries):
            choice.insert(0, _span(entries[int(number)]))
    for paragraph in root.iter("{*}p"):
        _mark_paragraph(paragraph, styles)
    _write_office(package, part, root, out)


def _mark_paragraph(paragraph: etree._Element, styles: Mapping[str, _Style]) -> None:
    """Note what HTML calls it in an attribute, and take what is hidden out."""
    style = styles.get(_style_name(paragraph), _Style())
    properties = paragraph.find("{*}pPr")
    level = _level(properties) or style.heading
    numbering = None if properties is None else properties.find("{*}numPr/{*}numId")
    is_list = style.is_list if numbering is None else _attribute(numbering, "val") != "0"
    paragraph.set("as", f"h{min(level, 6)}" if level else "li" if is_list else "p")
    for run in paragraph.iterfind(".//{*}r"):
        own = run.find("{*}rPr")
        if own is None:
            is_hidden = style.is_hidden
        elif (vanish := own.find("{*}vanish")) is not None:
            is_hidden = _attribute(vanish, "val") not in _OFF
        else:
            named = own.find("{*}rStyle")
            by_name = styles.get(_attribute(named, "val"), _Style()) if named is not None else _Style()
            is_hidden = style.is_hidden or by_name.is_hidden
        if is_hidden and run.find(".//{*}txbxContent") is None:
            run[:] = []
        raised = None if own is None else own.find("{*}vertAlign")
        if (
            raised is not None
            and _attribute(raised, "val") == "superscript"
            and (run.findtext("{*}t") or "")[:1].isdigit()
        ):
            run.insert(0, _span("^"))


def _styles(root: etree._Element) -> dict[str, _Style]:
    """Paragraph and character styles by id, with what they have from those that they are based on."""
    known = {_attribute(style, "styleId"): style for style in root.iterfind("{*}style")}

    def resolved(style_id: str, left: int) -> _Style:
        style = known.get(style_id)
        if style is None or not left:
            return _Style()
        base = style.find("{*}basedOn")
        above = _Style() if base is None else resolved(_attribute(base, "val"), left - 1)
        named = style.find("{*}name")
        name = "" if named is None else _attribute(named, "val").lower()
        word, _, level = name.partition(" ")
        heading = int(level) if word == "heading" and level.isdecimal() else int(name == "title")
        properties, vanish = style.find("{*}pPr"), style.find("{*}rPr/{*}vanish")
        numbered = properties is not None and properties.find("{*}numPr") is not None
        return _Style(
            heading or _level(properties) or above.heading,
            name.startswith("list") or numbered or above.is_list,
            above.is_hidden if vanish is None else _attribute(vanish, "val") not in _OFF,
        )

    return {style_id: resolved(style_id, 16) for style_id in known}


def _style_name(paragraph: etree._Element) -> str:
    style = paragraph.find("{*}pPr/{*}pStyle")
    return "" if style is None else _attribute(style, "val")


def _level(properties: etree._Element | None) -> int:
    """The outline level of paragraph properties, counted from 1; 0: body text."""
    level = None if properties is None else properties.find("{*}outlineLvl")
    value = "" if level is None else _attribute(level, "val")
    return int(value) + 1 if value.isdecimal() and int(value) < 9 else 0


# ---- PPTX -----------------------------------------------------------------------------------------------------------
def _write_slides(package: _Package, main: str, out: TextBuilder) -> tuple[tuple[int, ...], str]:
    """Append the slides; where each begins, and the first title."""
    targets = {relation: target for relation, _, target in package.related(main)}
    starts: list[int] = []
    title = ""
    for listed in package.xml(main).iterfind("{*}sldIdLst/{*}sldId"):
        if len(starts) == MAX_PAGES:
            raise UnreadableError(f"has more than {MAX_PAGES:,} slides; split it into smaller files", "invalid_file")
        starts.append(out.num_characters + 2 if out.num_characters else 0)  # after the break that comes first
        part = targets.get(_attribute(listed, "id"))
        if part is None:
            continue
        slide = package.xml(part)
        heading = _title_of(slide)
        title = title or heading
        out.paragraph("# ")
        out.text(heading)
        out.paragraph()
        _write_office(package, part, _without_furniture(slide), out)
        for notes in package.of_kind(part, "notesSlide"):
            out.paragraph()
            _write_office(package, "", _without_furniture(notes), out)
    return tuple(starts), title


def _title_of(slide: etree._Element) -> str:
    """Take the title out of a slide; "" where it has none, or a long one, which stays."""
    for shape in slide.iter("{*}sp"):
        place = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
        if place is not None and place.get("type") in ("title", "ctrTitle"):
            lines = ("".join(p.itertext("{*}t")) for p in shape.iter("{*}p"))
            if title := one_line(" ".join(lines)):
                _remove(shape)
                return title
    return ""


def _without_furniture(slide: etree._Element) -> etree._Element:
    """Without hidden shapes, and the placeholders that every slide has."""
    for shape in list(slide.iter("{*}sp", "{*}grpSp", "{*}graphicFrame")):
        place = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
        kind = "" if place is None else place.get("type")
        hidden = next(shape.iterfind("*/{*}cNvPr"), shape).get("hidden", "0") not in _OFF
        if hidden or kind in ("sldNum", "sldImg", "dt", "hdr"):
            _remove(shape)
    return slide


# ---- both -----------------------------------------------------------------------------------------------------------
def _write_office(package: _Package | None, part: str, root: etree._Element, out: TextBuilder) -> None:
    """Append a tree of WordprocessingML or DrawingML."""
    for choices in root.iter("{*}AlternateContent"):  # one of several forms of the same: the first that has text
        taken = next((each for each in choices if next(each.iter("{*}t"), None) is not None), None)
        choices[:] = [] if taken is None else [taken]
    targets = {} if package is None else {relation: target for relation, _, target in package.related(part)}
    for frame in list(root.iter("{*}chart", "{*}relIds")):
        target = targets.get(_attribute(frame, "id") or _attribute(frame, "dm"))
        if package is not None and target is not None:
            drawn = package.xml(target)
            next(frame.iterancestors("{*}p"), frame).addnext(drawn)
    for box in reversed(list(root.iter("{*}txbxContent"))):
        paragraph = next(box.iterancestors("{*}p"), None)
        if paragraph is not None:
            paragraph.addnext(box)
    for reading in list(root.iter("{*}rt")):  # an aid to reading, which stands before its word
        reading.insert(0, _span("("))
        reading.append(_span(")"))
        if (word := reading.getparent()) is not None:
            word.append(reading)
    for cell in root.iter("{*}tc"):
        if (span := cell.find("{*}tcPr/{*}gridSpan")) is not None:
            cell.set("colspan", _attribute(span, "val"))
    etree.strip_elements(root, *(f"{{*}}{name}" for name in _GONE), with_tail=False)
    for element in root.iter("*"):
        name, element.tail = _local(element), None
        if name == "p":
            element.tag = element.get("as", "line")
        elif name in _SIGNS:
            element.insert(0, _span(_SIGNS[name]))
            element.tag = "span"
        elif name == "v" and element.text:
            element.text, element.tag = f"{element.text} ", "span"
        elif name not in ("t", "span"):
            element.text = None
    etree.strip_tags(root, *(f"{{*}}{name}" for name in _WRAPPERS))
    for element in root.iter("*"):
        if (name := _local(element)) != element.tag:
            element.tag = _TAGS.get(name, "span")
    write_tree(root, out)


def _local(element: etree._Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _attribute(element: etree._Element, name: str) -> str:
    """The value of an attribute of any namespace, but of one."""
    return next((str(value) for key, value in element.attrib.items() if str(key).endswith("}" + name)), "")


def _span(text: str) -> etree._Element:
    made = etree.Element("span")
    made.text = text
    return made


def _remove(element: etree._Element) -> None:
    if (parent := element.getparent()) is not None:
        parent.remove(element)


# ---- ODT ------------------------------------------------------------------------------------------------------------
_OPEN_TAGS: Mapping[str, str] = {
    "p": "p", "list": "ul", "list-item": "li", "list-header": "li", "table": "table", "table-row": "tr",
    "table-cell": "td", "covered-table-cell": "td", "line-break": "br", "text-box": "aside", "note": "aside",
    "annotation": "aside", "header": "header", "footer": "footer", "section": "div",
}  # fmt: skip
_MAX_REPEATED = 64  # cells, of one that is written once
_OPEN_GONE = (
    *("tracked-changes", "note-citation", "forms", "scripts", "font-face-decls", "automatic-styles"),
    *("table-of-content-source", "illustration-index-source", "bibliography-source", "alphabetical-index-source"),
    *("header-decl", "footer-decl", "date-time-decl", "page-number"),  # of slides
)
_OPEN_FOREIGN = (  # of a picture, a comment's author and date
    "{urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0}*",
    "{http://purl.org/dc/elements/1.1/}*",
)


def _open_document(archive: ZipFile) -> ReadText:
    names = archive.namelist()
    if "META-INF/manifest.xml" in names and b"encryption-data" in archive.read("META-INF/manifest.xml"):
        raise UnreadableError("is protected by a password; save a copy without one")
    content = xml_member(archive, "content.xml")
    styles = xml_member(archive, "styles.xml") if "styles.xml" in names else etree.Element("none")
    title = xml_member(archive, "meta.xml").findtext(".//{*}title") if "meta.xml" in names else ""
    hidden = {
        _attribute(style, "name")
        for root in (styles, content)
        for style in root.iter("{*}style")
        if any(_attribute(each, "display") == "none" for each in style.iterfind("{*}text-properties"))
    }
    out = TextBuilder()
    known: set[str] = set()
    for part in (
        *styles.iterfind(".//{*}master-page/{*}header"),
        *content.iterfind("{*}body"),
        *styles.iterfind(".//{*}master-page/{*}footer"),
    ):
        if (text := "".join(part.itertext())) not in known:
            known.add(text)
            _write_open(part, hidden, out)
    return ReadText(one_line(title or ""), out.build(NO_TEXT))


def _write_open(root: etree._Element, hidden: set[str], out: TextBuilder) -> None:
    etree.strip_elements(root, *(f"{{*}}{name}" for name in _OPEN_GONE), *_OPEN_FOREIGN, with_tail=False)
    etree.strip_tags(root, "{*}table-header-rows", "{*}table-rows", "{*}table-row-group")
    for box in reversed(list(root.iter("{*}text-box", "{*}note", "{*}annotation"))):
        paragraph = next(box.iterancestors("{*}p", "{*}h"), None)
        parent = box.getparent()
        if paragraph is not None and parent is not None:
            rest = etree.Element("span")
            rest.tail, box.tail = box.tail, None
            parent.replace(box, rest)
            paragraph.addnext(box)
            if _local(box) != "text-box":
                label = "Note: " if _local(box) == "note" else "Comment: "
                first = next(box.iter("{*}p"), box)
                first.text = label + (first.text or "")
    for cell in list(root.iter("{*}table-cell")):  # one that stands for several with the same text
        number = _attribute(cell, "number-columns-repeated")
        if number.isdecimal() and any(map(str.strip, cell.itertext())):
            for _ in range(min(int(number), _MAX_REPEATED) - 1):
                cell.addnext(deepcopy(cell))
    for frame in root.iter("{*}frame"):  # of a slide
        if _attribute(frame, "class") == "title" and (title := next(frame.iter("{*}p"), None)) is not None:
            title.tag = "h"
    for element in root.iter("*"):
        name = _local(element)
        is_hidden = _attribute(element, "style-name") in hidden or _attribute(element, "is-hidden") == "true"
        if is_hidden or _attribute(element, "display") == "none" or _attribute(element, "visibility") == "collapse":
            element.set("hidden", "")
        if name in ("s", "tab"):
            element.text = " "
        level = _attribute(element, "outline-level")
        heading = f"h{min(int(level), 6)}" if level.isdecimal() and level != "0" else "h1"
        element.tag = heading if name == "h" else _OPEN_TAGS.get(name, "span")
    write_tree(root, out)


# ---- spreadsheets ---------------------------------------------------------------------------------------------------
def read_sheets(data: bytes, _name: str) -> ReadText:
    """Each visible sheet under its name, a line for each of its rows: row n is line n after the heading, empty ones
    included. Not handled: hidden rows and columns, formats of numbers, notes of cells, charts."""
    from python_calamine import CalamineError, CalamineWorkbook, PasswordError, SheetTypeEnum, SheetVisibleEnum

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
            lines += [*before, f" {line}" if line.startswith("#") else line]  # a cell is no heading
            size += len(line) + 1
            before = []
            if size > MAX_TEXT_BYTES:
                raise too_long()
    if not any(line and not line.startswith("# ") for line in lines):
        raise UnreadableError("has no text in its sheets; if it holds images or charts, save it as PDF")
    return ReadText("", "\n".join(lines).strip("\n"))


def _shown(cell: object) -> str:
    if isinstance(cell, float):  # 15 digits, as spreadsheets show what is no fraction exactly
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else f"{cell:.15g}"
    return cell.isoformat(" ", "seconds") if isinstance(cell, datetime) else str(cell)
