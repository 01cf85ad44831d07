"""Documents of each kind, made from a few words."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence

import docx
import pptx
import pypdfium2
from pptx.util import Inches


def pdf(pages: Sequence[bytes], title: str = "", *, extra: bytes = b"", compressed: bool = False) -> bytes:
    """A PDF whose pages have these content streams. extra: entries of the trailer."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for content in pages:
        packed = zlib.compress(content, 9) if compressed else content
        flate = b"/Filter /FlateDecode " if compressed else b""
        objects.append(b"<< %s/Length %d >>\nstream\n%s\nendstream" % (flate, len(packed), packed))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    objects.append(b"<< /Title (%s) >>" % title.encode())
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer\n<< /Size %d /Root 1 0 R /Info %d 0 R %s >>\n" % (len(objects) + 1, len(objects), extra)
    return bytes(out + b"startxref\n%d\n%%%%EOF\n" % start)


# Half a minute of work, without much memory.
ENDLESS = b"{\\rtf1 " + b"\\b" * 2**24


def shown(*lines: str) -> bytes:
    """The content stream of a page with these lines."""
    return (
        b"BT /F1 12 Tf 72 720 Td " + b" ".join(b"(%s) Tj 0 -14 Td" % line.encode("latin-1") for line in lines) + b" ET"
    )


def scanned(*lines: str) -> bytes:
    """A PDF of one page, which is a picture of these lines."""
    with pypdfium2.PdfDocument(pdf([shown(*lines)])) as source, pypdfium2.PdfDocument.new() as made:
        width, height = source[0].get_size()
        page, image = made.new_page(width, height), pypdfium2.PdfImage.new(made)
        image.set_bitmap(source[0].render(scale=200 / 72))
        image.set_matrix(pypdfium2.PdfMatrix().scale(width, height))
        page.insert_obj(image)
        page.gen_content()
        out = io.BytesIO()
        made.save(out)
    return out.getvalue()


def word_document() -> bytes:
    made = docx.Document()
    made.core_properties.title = "Harbour rules"
    made.add_heading("Moorings", 1)
    made.add_paragraph("Boats moor on the north side.")
    made.add_paragraph("Ropes", style="List Bullet")
    made.add_paragraph("Fenders", style="List Bullet")
    table = made.add_table(2, 2)
    for row, cells in zip(table.rows, (("Berth", "Fee"), ("7", "12 marks")), strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    made.add_heading("Fires", 2)
    made.add_paragraph("None on deck.")
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def archive(members: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return out.getvalue()


CONTAINER = (
    b'<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">'
    b'<rootfiles><rootfile full-path="OPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
    b"</container>"
)


def book(chapters: Mapping[str, bytes], order: Sequence[str], more: Mapping[str, bytes] | None = None) -> bytes:
    items = "".join(f'<item id="{name}" href="{name}" media-type="application/xhtml+xml"/>' for name in chapters)
    spine = "".join(f'<itemref idref="{name}"/>' for name in order)
    package = (
        '<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        '<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The Lamp</dc:title></metadata>'
        f"<manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    parts = {"mimetype": b"application/epub+zip", "META-INF/container.xml": CONTAINER, "OPS/book.opf": package.encode()}
    return archive({**parts, **{f"OPS/{name}": data for name, data in chapters.items()}, **(more or {})})


def presentation() -> bytes:
    made = pptx.Presentation()
    first = made.slides.add_slide(made.slide_layouts[0])
    first.shapes.title.text = "Harbour plans"
    first.placeholders[1].text = "For the next year"
    second = made.slides.add_slide(made.slide_layouts[5])
    second.shapes.title.text = "Fees"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
    for row, cells in zip(table.rows, (("Berth", "Fee"), ("7", "12 marks")), strict=True):
        for cell, text in zip(row.cells, cells, strict=True):
            cell.text = text
    group = second.shapes.add_group_shape()
    group.shapes.add_textbox(Inches(1), Inches(4), Inches(2), Inches(1)).text_frame.text = "Paid at the gate."
    second.notes_slide.notes_text_frame.text = "Say that boats of the town pay nothing."
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def workbook(cells: Mapping[str, str], more: Mapping[str, Mapping[str, str]] | None = None) -> bytes:
    """A workbook of one sheet, Fees, with these cells, and of hidden ones."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    relations = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    sheets = {"Fees": cells, **(more or {})}
    listed, related, parts = "", "", {}
    for number, (name, filled) in enumerate(sheets.items(), 1):
        state = "" if number == 1 else ' state="hidden"'
        listed += f'<sheet name="{name}" sheetId="{number}" r:id="r{number}"{state}/>'
        related += f'<Relationship Id="r{number}" Type="{relations}/worksheet" Target="worksheets/sheet{number}.xml"/>'
        rows: dict[str, str] = {}
        for place, text in filled.items():
            row = place.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
            value = f"<v>{text}</v></c>" if text.isdecimal() else f"<is><t>{text}</t></is></c>"
            kind = "n" if text.isdecimal() else "inlineStr"
            rows[row] = rows.get(row, "") + f'<c r="{place}" t="{kind}">{value}'
        written = "".join(f'<row r="{row}">{cells}</row>' for row, cells in rows.items())
        parts[f"xl/worksheets/sheet{number}.xml"] = (
            f'<worksheet xmlns="{main}"><sheetData>{written}</sheetData></worksheet>'.encode()
        )
    types = f'<Types xmlns="{package}/content-types"><Default Extension="xml" ContentType="application/xml"/></Types>'
    office = f'<Relationship Id="r" Type="{relations}/officeDocument" Target="xl/workbook.xml"/>'
    return archive({
        "[Content_Types].xml": types.encode(),
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">{office}</Relationships>'.encode(),
        "xl/workbook.xml": (
            f'<workbook xmlns="{main}" xmlns:r="{relations}"><sheets>{listed}</sheets></workbook>'.encode()
        ),
        "xl/_rels/workbook.xml.rels": (
            f'<Relationships xmlns="{package}/relationships">{related}</Relationships>'.encode()
        ),
        **parts,
    })  # fmt: skip
