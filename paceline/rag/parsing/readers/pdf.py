"""PDF by PDFium: the text of each page with the fields and remarks on it, and where each begins. Pages of a document
without any text are recognised by Tesseract, where its library is installed.

Ligatures are letters, words broken at a line's end are whole where that is certain, and letters that were drawn singly
on a grid are words. Not handled: images beside text, columns that the file stores out of order.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median

import pypdfium2
import pypdfium2.raw as pdfium

from paceline.rag.parsing.kinds import MAX_PAGES, MAX_TEXT_BYTES, Limits
from paceline.rag.parsing.readers.content import LIGATURES, ReadText, UnreadableError, one_line, too_long

_JUNK = ("untitled", "microsoft word", "microsoft powerpoint", "about:blank")  # titles that programs make up
_BREAK = "\x02"  # what PDFium makes of a hyphen at a line's end, with the line end
_BROKEN = re.compile(rf"(\w{{1,40}}){_BREAK}(\w{{1,40}})")
_WORD = re.compile(r"[\w-]+")
_MIN_EVIDENCE = 4  # letters of half a broken word that say something where it occurs alone
_SINGLY = 3.0  # mean letters of the words of a line whose letters may be drawn singly
_HIDDEN = 0b10  # flag of an annotation
_TESSERACT = ("libtesseract.so.5", "libtesseract.so.4", "libtesseract.5.dylib")  # none on Windows, in the usual places
_DPI = 200
_LEFT_S = 5.0  # of the processor time that a document may take, for what is not recognising
_ON_PAGE = (pdfium.FPDF_ANNOT_FREETEXT, pdfium.FPDF_ANNOT_TEXT, pdfium.FPDF_ANNOT_WIDGET)


def read_pdf(data: bytes, _name: str) -> ReadText:
    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pdfium.FPDF_ERR_PASSWORD:
            raise UnreadableError("is protected by a password; save a copy without one") from None
        if error.err_code == pdfium.FPDF_ERR_SECURITY:
            raise UnreadableError("is protected in a way that cannot be read; save a copy without protection") from None
        raise
    document.init_forms()
    texts, failed = _pages(document)
    if texts and not any(texts) and failed < len(texts):
        texts = _recognised(document, Limits().for_size(len(data)).cpu_s - _LEFT_S)
    if not any(texts):
        if failed or not texts:
            raise UnreadableError("is damaged: none of its pages can be read; export it again", "invalid_file")
        raise UnreadableError(
            f"has no text on its {len(texts)} page{'' if len(texts) == 1 else 's'}, so it is probably scanned; "
            "recognise its text first, for instance with: ocrmypdf in.pdf out.pdf"
        )
    texts = _mended(texts)
    whole = "\n\n".join(text for text in texts if text)
    starts, position = [], 0
    for text in texts:
        starts.append(min(position, len(whole)))  # a page without text begins where the next one does
        position += len(text) + 2 if text else 0
    title = one_line(document.get_metadata_value("Title"))
    return ReadText("" if title.lower().startswith(_JUNK) else title, whole, tuple(starts))


def _pages(document: pypdfium2.PdfDocument) -> tuple[list[str], int]:
    """The text of each page, and the number of pages that could not be read."""
    texts: list[str] = []
    failed = size = 0
    if len(document) > MAX_PAGES:
        raise UnreadableError(f"has more than {MAX_PAGES:,} pages; split it into smaller files", "invalid_file")
    for number in range(len(document)):
        try:
            page = document[number]
            shown = page.get_textpage()
            text = _clean("\n".join([*_lines(shown), *_remarks(document, page)]))
            shown.close()
            page.close()
        except pypdfium2.PdfiumError:  # of a damaged page: the others may be whole
            failed += 1
            text = ""
        texts.append(text)
        size += len(text)
        if size > MAX_TEXT_BYTES:
            raise too_long()
    return texts, failed


def _recognised(document: pypdfium2.PdfDocument, until_s: float) -> list[str]:
    """The text in the pictures of the pages, each "" without the library; until so much processor time is used."""
    texts = [""] * len(document)
    library = next(filter(None, map(_library, _TESSERACT)), None)
    if library is None:
        return texts
    for name in ("Create", "GetUTF8Text"):
        getattr(library, f"TessBaseAPI{name}").restype = ctypes.c_void_p
    engine = ctypes.c_void_p(library.TessBaseAPICreate())
    if library.TessBaseAPIInit3(engine, None, b"eng"):
        return texts
    for number in range(len(document)):
        if time.process_time() > until_s:
            raise UnreadableError(
                f"has {len(document)} scanned pages, which take too long to be recognised here; split it, or recognise "
                "its text first, for instance with: ocrmypdf in.pdf out.pdf"
            )
        with suppress(pypdfium2.PdfiumError):  # of a damaged page
            page = document[number]
            shown = page.render(scale=_DPI / 72, grayscale=True)
            library.TessBaseAPISetImage(engine, shown.buffer, shown.width, shown.height, 1, shown.stride)
            library.TessBaseAPISetSourceResolution(engine, _DPI)
            found = ctypes.c_void_p(library.TessBaseAPIGetUTF8Text(engine))
            texts[number] = _clean((ctypes.string_at(found) if found else b"").decode("utf-8", "replace"))
            library.TessDeleteText(found)
            shown.close()
            page.close()
    return texts


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _lines(page: pypdfium2.PdfTextPage) -> Iterator[str]:
    """The lines of a page, as PDFium finds them."""
    codes = [pdfium.FPDFText_GetUnicode(page, index) for index in range(page.count_chars())]
    start = 0
    for index in (*(index for index, code in enumerate(codes) if code == 0x0A), len(codes)):
        line = "".join(chr(code) for code in codes[start:index] if 0 < code <= 0x10FFFF).strip("\r")
        words = line.split()
        if len(words) > 1 and sum(map(len, words)) < _SINGLY * len(words):
            gaps = _false_gaps(page, start, index)
            kept = (code for at, code in enumerate(codes[start:index], start) if at not in gaps)
            line = "".join(chr(code) for code in kept if 0 < code <= 0x10FFFF).strip("\r")
        yield line
        start = index + 1


def _false_gaps(page: pypdfium2.PdfTextPage, start: int, end: int) -> set[int]:
    """Blanks that PDFium found between letters that are no word's end: those of a line whose letters stand at equal
    steps of less than the font's size, whatever their widths, and that make no longer step."""
    boxes: list[tuple[int, float, float]] = []
    height = 0.0  # about that of the font
    rect = pdfium.FS_RECTF()
    for index in range(start, end):
        if pdfium.FPDFText_IsGenerated(page, index) != 1 and pdfium.FPDFText_GetLooseCharBox(page, index, rect):
            boxes.append((index, rect.left, rect.right))
            height = max(height, rect.top - rect.bottom)
    pairs = list(itertools.pairwise(boxes))
    if len(pairs) < 3:
        return set()
    steps = [after[1] - before[1] for before, after in pairs]
    step = median(steps)
    even = [abs(each - step) < 0.03 * step for each in steps]
    uneven_widths = sum(abs(after[1] - before[2]) > 0.05 * step for before, after in pairs)
    if not 0 < step < height or sum(even) < 0.8 * len(even) or 2 * uneven_widths < len(pairs):
        return set()
    return {
        index
        for (before, after), is_even in zip(pairs, even, strict=True)
        if is_even
        for index in range(before[0] + 1, after[0])
    }


def _remarks(document: pypdfium2.PdfDocument, page: pypdfium2.PdfPage) -> Iterator[str]:
    """What fields of a form were filled with, under their names, and what was written on the page."""
    form = document.formenv
    for index in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, index)
        kind = pdfium.FPDFAnnot_GetSubtype(annotation)
        if kind in _ON_PAGE and not pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN:
            if kind != pdfium.FPDF_ANNOT_WIDGET:
                yield _said(lambda *to, of=annotation: pdfium.FPDFAnnot_GetStringValue(of, b"Contents", *to))
            elif form is not None:
                value = _said(lambda *to, of=annotation: pdfium.FPDFAnnot_GetFormFieldValue(form, of, *to))
                label = _said(lambda *to, of=annotation: pdfium.FPDFAnnot_GetFormFieldAlternateName(form, of, *to))
                label = label or _said(lambda *to, of=annotation: pdfium.FPDFAnnot_GetFormFieldName(form, of, *to))
                if value.strip() and value != "Off":  # what a box without a cross is called
                    yield f"{label}: {value}" if label else value
        pdfium.FPDFPage_CloseAnnot(annotation)


def _said(get: Callable[..., int]) -> str:
    """A text of PDFium, which is asked for its size in bytes, then for UTF-16 with a zero."""
    size = get(None, 0)
    buffer = ctypes.create_string_buffer(max(2, size))
    get(ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort)), size)
    return buffer.raw[:size].decode("utf-16-le", "replace").strip("\0")


def _clean(text: str) -> str:
    """Without trailing blanks and characters that cannot be shown; with letters for ligatures."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").translate(LIGATURES)
    shown = "".join(each if each.isprintable() or each in f"\n\t{_BREAK}" else " " for each in text)
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip()


def _mended(texts: list[str]) -> list[str]:
    """Words that were broken at a line's end, whole where the other words of the document do not speak against it."""
    if not any(_BREAK in text for text in texts):
        return texts
    known = {word.lower() for text in texts for word in _WORD.findall(_BROKEN.sub(" ", text))}

    def joined(found: re.Match[str]) -> str:
        first, last = found.groups()
        halves = [half for half in (first.lower(), last.lower()) if len(half) >= _MIN_EVIDENCE and half in known]
        if (first + last).lower() in known:
            return first + last
        if f"{first}-{last}".lower() in known:
            return f"{first}-{last}"
        return f"{first}-\n{last}" if halves or not last[0].islower() else first + last

    return [_BROKEN.sub(joined, text).replace(_BREAK, "-\n") for text in texts]
