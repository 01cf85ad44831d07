"""EPUB: the chapters in reading order, each as the HTML that it is (EPUB 3.3, sections 4 and 5).

Not handled: fixed layouts of images, audio.
"""

from __future__ import annotations

import posixpath
from urllib.parse import unquote
from zipfile import ZipFile

from lxml import etree

from paceline.rag.parsing.readers.archive import member, open_archive, xml_member
from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError, one_line
from paceline.rag.parsing.readers.markup import write_markup

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def read(data: bytes, name: str) -> Content:
    del name
    archive = open_archive(data)
    names = set(archive.namelist())
    package_path = _attribute(xml_member(archive, _CONTAINER), "{*}rootfiles/{*}rootfile", "full-path")
    if package_path not in names:
        raise UnreadableError("is damaged: it names no package; download or export it again", "invalid_file")
    package = xml_member(archive, package_path)
    hidden = _encrypted(archive) if _ENCRYPTION in names else frozenset()
    out, title, num_chapters, num_hidden = TextBuilder(), "", 0, 0
    for chapter in _reading_order(package, posixpath.dirname(package_path)):
        if chapter not in names:
            continue
        num_chapters += 1
        if chapter in hidden:
            num_hidden += 1
            continue
        out.paragraph()
        try:
            heading = write_markup(member(archive, chapter), out)
            title = title or heading
        except UnreadableError as error:
            if "empty" not in error.reason:  # an empty page between chapters
                raise
    if num_hidden == num_chapters > 0:
        raise UnreadableError(
            "is protected by its publisher (DRM), so its text cannot be read; use an unprotected copy"
        )
    if not out.num_characters:
        raise UnreadableError("has no text; if its pages are images, recognise their text first and save that as PDF")
    return Content(one_line(package.findtext("{*}metadata/{*}title") or "") or title, out.build())


def _reading_order(package: etree._Element, folder: str) -> list[str]:
    """Paths of the chapters in the archive, each once; last those that no order names, such as notes."""
    paths: dict[str, str] = {}
    contents = ""  # the table of contents
    for item in package.iterfind("{*}manifest/{*}item"):
        if "html" in item.get("media-type", ""):
            paths[item.get("id", "")] = posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
            contents = item.get("id", "") if "nav" in item.get("properties", "").split() else contents
    order = [item.get("idref", "") for item in package.iterfind("{*}spine/{*}itemref")]
    order += [chapter for chapter in paths if chapter != contents]
    return list(dict.fromkeys(paths[chapter] for chapter in order if chapter in paths))


def _encrypted(archive: ZipFile) -> frozenset[str]:
    references = xml_member(archive, _ENCRYPTION).iter("{*}CipherReference")
    return frozenset(unquote(reference.get("URI", "")) for reference in references)


def _attribute(root: etree._Element, path: str, attribute: str) -> str:
    element = root.find(path)
    return "" if element is None else element.get(attribute, "")
