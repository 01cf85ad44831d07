"""HTML to text: headings, lists and tables as Markdown, everything that is not shown left out; EPUB, the chapters in
reading order, each as the HTML that it is (EPUB 3.3, sections 4 and 5); and XML that holds data, as JSON is written.

libxml2 reads it, without network, DTDs or entities of the document's own. Other kinds are made into such a tree and
written here too. Not handled: style sheets in other files and rules for some media, frames, values of form fields, and
what scripts would write or reveal; books of images, audio.
"""

from __future__ import annotations

import posixpath
import re
from contextlib import suppress
from itertools import groupby
from urllib.parse import unquote
from zipfile import ZipFile

from lxml import etree

from paceline.rag.parsing.readers.content import (
    NO_TEXT,
    ReadText,
    TextBuilder,
    UnreadableError,
    decode,
    member,
    one_line,
    open_archive,
)
from paceline.rag.parsing.readers.text import with_named_cells, written

_HIDDEN = frozenset({
    "annotation", "annotation-xml", "audio", "canvas", "datalist", "defs", "desc", "head", "iframe", "metadata",
    "noscript", "object", "script", "select", "style", "template", "title", "video",
})  # fmt: skip
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "caption", "details", "dialog", "div", "dl",
    "fieldset", "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "main", "menu", "nav", "ol", "p",
    "section", "summary", "svg", "table", "tbody", "tfoot", "thead", "ul",
})  # fmt: skip
_LINES = ("br", "line", "text", "tr")  # `text`: of a drawing; `line`: of trees that other readers make
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_MAX_SPAN = 64  # columns of one cell
_NO_CELL = ("table", "pre", *_HEADINGS)  # what makes a table one of a page's layout, whose cells are paragraphs
_META_WITHIN = 4096  # bytes; browsers look for a character set in the first 1,024
_DECLARING = re.compile(rb"<meta\b[^>]*+|\A\s*+<\?xml\b[^>]*+", re.IGNORECASE)
_CHARSET = re.compile(rb"""\b(?:charset|encoding)\s*+=\s*+["']?+\s*+([\w.:-]++)""", re.IGNORECASE)
_NOTHING = re.compile(r"(?:0+(?:\.0*)?|\.0+)(?:[a-z]+|%)?")  # a size or an opacity
_SELECTOR = re.compile(r"[a-z0-9]*[.#][\w-]+")  # the selectors of a style sheet that are looked at


def read_html(data: bytes, _name: str) -> ReadText:
    out = TextBuilder()
    title = write_markup(data, out)
    return ReadText(title, out.build("shows no text; if scripts write its text, save it from a browser as PDF"))


def write_markup(data: bytes, out: TextBuilder, charset: str = "") -> str:
    """Append what an HTML document shows, and return its title. charset: as it was sent; else what it says itself."""
    text = decode(data, charset or declared_charset(data))
    if text.lstrip().startswith("<?xml"):  # its encoding is no longer true, and the parser would believe it
        text = text[text.find(">") + 1 :]
    parser = etree.HTMLParser(
        encoding="utf-8", no_network=True, remove_comments=True, remove_pis=True, huge_tree=False, recover=True
    )
    root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    if root is None:
        return ""
    write_tree(root, out, _hiding_rules(root))
    heading = root.find(".//h1")
    return one_line(root.findtext("head/title") or "") or (
        "" if heading is None else one_line("".join(heading.itertext()))
    )


def declared_charset(data: bytes) -> str:
    """The character set of a `meta` element or an XML declaration, as written; "" for none."""
    head = re.sub(rb"<!--.*?(?:-->|\Z)", b"", data[:_META_WITHIN], flags=re.DOTALL)
    found = next(filter(None, (_CHARSET.search(tag[0]) for tag in _DECLARING.finditer(head))), None)
    return "" if found is None else found[1].decode("ascii", "replace")


def write_tree(root: etree._Element, out: TextBuilder, hiding: frozenset[str] = frozenset()) -> None:
    """Append what a tree of HTML elements shows. hiding: selectors of what is not.

    Walks without recursion, since the tree may be deep. A row of a table is a line, whatever its cells hold, with the
    names of its columns where they are known; so is a term with what explains it.
    """
    verbatim = 0  # depth of `pre`
    row = skipped = None  # the row that is being written as one line; the element that is left out
    term = 0  # where one begins that is explained
    tables: list[int] = []  # where those begin that are being written; -1: it holds others
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag = element.tag if isinstance(element.tag, str) else ""
        if event == "start":
            is_empty = tag == "tr" and not any(map(str.strip, element.itertext()))
            if not tag or tag in _HIDDEN or is_empty or _is_hidden(element, hiding):
                walk.skip_subtree()
                skipped = element
                continue
            if row is not None:
                _begin_in_row(tag, element, out)
            else:
                _begin(tag, element, out)
            if tag == "tr" and next(element.iter(*_NO_CELL), None) is None:
                row = element
            if tag == "table":
                tables.append(out.place)
            if tag == "dt":
                term = out.place
            if tag == "sup" and "".join(map(str, element.itertext())).strip()[:1].isdigit():
                out.text("^")  # of a power, or a note
            verbatim += tag == "pre"
            _put(element.text, verbatim, out)
            continue
        row = None if row is element else row
        if skipped is not element:
            verbatim -= tag == "pre"
            if row is None:
                _end(tag, out)
            elif tag in _BLOCKS or tag == "dd":
                out.text(" ")
            elif tag in ("td", "th") and (span := element.get("colspan", "")).isdecimal():
                out.text(" |" * (min(int(span), _MAX_SPAN) - 1))  # what follows is of a later column
            if tag == "dt" and row is None:
                out.rewrite(term, lambda text: f"{text.rstrip(' :')}:" if text else "")
            if tag == "table":
                if (place := tables.pop()) >= 0:
                    out.rewrite(place, with_named_cells)
                tables[-1:] = [-1] * bool(tables)
        if element is not root:
            _put(element.tail, verbatim, out)


def _put(text: str | None, verbatim: int, out: TextBuilder) -> None:
    if text:
        (out.verbatim if verbatim else out.text)(text)


def _begin(tag: str, element: etree._Element, out: TextBuilder) -> None:
    if tag in _HEADINGS:
        out.paragraph(_HEADINGS[tag])
    elif tag in _BLOCKS or tag in ("pre", "td", "th"):
        parent = element.getparent()
        is_item = parent is not None and parent.tag in ("li", "dd") and element.getprevious() is None
        if not is_item or (parent is not None and (parent.text or "").strip()):  # an item's mark is written already
            out.paragraph()
    elif tag == "li":
        out.line("- ")
    elif tag == "dt":
        out.line()
    elif tag == "dd":
        before = element.getprevious()
        if before is None or before.tag != "dt":
            out.line()
        else:
            out.text(" ")
    elif tag in _LINES:
        out.line()


def _begin_in_row(tag: str, element: etree._Element, out: TextBuilder) -> None:
    if tag in ("td", "th"):
        if element.getprevious() is not None:
            out.text(" | ")
    elif tag in _BLOCKS or tag in _LINES or tag in ("li", "dt", "dd"):
        out.text(" ")


def _end(tag: str, out: TextBuilder) -> None:
    if tag in _HEADINGS or tag in _BLOCKS or tag in ("pre", "td", "th"):
        out.paragraph()
    elif tag in ("li", "tr", "line", "dd"):
        out.line()


def _is_hidden(element: etree._Element, hiding: frozenset[str]) -> bool:
    """Whether browsers leave an element out, by its attributes or by these selectors."""
    get = element.get
    if get("hidden", "until-found") != "until-found" or get("aria-hidden") == "true" or get("popover") is not None:
        return True
    if (element.tag == "dialog" and get("open") is None) or _hides(get("style", "")):
        return True
    names = [f".{name}" for name in get("class", "").split()] + [f"#{get('id', '')}"] if hiding else []
    return any(name in hiding or element.tag + name in hiding for name in names)


def _hides(declarations: str) -> bool:
    pairs = (part.partition(":") for part in declarations.lower().split(";"))
    values = {name.strip(): value.partition("!")[0].strip() for name, _, value in pairs}
    return (
        values.get("display") == "none"
        or values.get("visibility") in ("hidden", "collapse")
        or any(_NOTHING.fullmatch(values.get(name, "")) for name in ("opacity", "font-size"))
    )


def _hiding_rules(root: etree._Element) -> frozenset[str]:
    """Selectors by class or id that the document's own style sheets hide, whatever the medium."""
    hiding: set[str] = set()
    for sheet in root.iter("style"):
        comments = (sheet.text or "").split("/*")
        depth = 0  # of rules for some media
        for block in "".join([comments[0], *(each.partition("*/")[2] for each in comments[1:])]).split("}"):
            selectors, _, declarations = block.rpartition("{")
            if not depth and block.count("{") == 1 and "@" not in selectors.rpartition(";")[2]:
                found = {each.strip() for each in selectors.rpartition(";")[2].split(",")}
                found = {each for each in found if _SELECTOR.fullmatch(each)}
                if _hides(declarations):
                    hiding |= found
                elif "display" in declarations.lower():
                    hiding -= found
            depth = max(0, depth + block.count("{") - 1)
    return frozenset(hiding)


def xml_member(archive: ZipFile, name: str) -> etree._Element:
    """A member as XML: no entities, no DTD, no network."""
    root = _parsed(member(archive, name))
    if root.getroottree().docinfo.internalDTD is not None:
        raise UnreadableError("defines XML entities, which no such file needs; export it again", "invalid_file")
    return root


def _parsed(data: bytes) -> etree._Element:
    parser = etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True
    )
    return etree.fromstring(data, parser)


# ---- XML ------------------------------------------------------------------------------------------------------------
_SCHEMA = "{http://www.w3.org/2001/XMLSchema-instance}"
_TAG = re.compile(r"<(/?)([a-z][a-z0-9]{0,9})(?:\s[^<>]*+)?/?>")
_ELEMENTS = _BLOCKS | _HEADINGS.keys() | frozenset({  # in a text of HTML; "<source>" may be a word of a usage
    "html", "head", "link", "meta", "title",
    "a", "abbr", "b", "big", "br", "center", "cite", "code", "dd", "del", "dt", "em", "font", "i", "img", "ins", "kbd",
    "li", "mark", "pre", "q", "s", "small", "span", "strike", "strong", "sub", "sup", "td", "th", "tr", "tt", "u",
})  # fmt: skip
_UNCLOSED = frozenset({"br", "hr", "img", "li", "p"})
_LONGEST_WORD = 200  # characters: longer ones are data in base64, coordinates


def read_xml(data: bytes, name: str) -> ReadText:
    """Elements and attributes as named values; a document whose text has elements in it stays as it is."""
    try:
        value: object = _value(_parsed(data.lstrip()))
    except (etree.XMLSyntaxError, ValueError, RecursionError):
        value = ""
    return ReadText(name, written([value]) if isinstance(value, tuple) else decode(data, declared_charset(data)))


def _value(element: etree._Element) -> object:
    """A text, or pairs of a name and a value, equal names that follow each other as one list; text with elements in it
    is a text. Raises ValueError for entities that are not resolved."""
    if any(not isinstance(child.tag, str) for child in element):
        raise ValueError(f"{element.tag} has entities in it")
    children = [(etree.QName(child).localname, child) for child in element]
    if any(map(str.strip, filter(None, [*(child.tail for child in element), element.text if children else ""]))):
        return _said("".join(map(str, element.itertext())))
    pairs: list[tuple[str, object]] = []
    for attribute, given in element.attrib.items():
        if not str(attribute).startswith(_SCHEMA) and (said := _said(given)):
            pairs.append((etree.QName(attribute).localname, said))
    if etree.QName(element).localname == "dict" and {name for name, _ in children[::2]} == {"key"}:  # of Apple's lists
        children = [
            (each.text or "", value) for (_, each), (_, value) in zip(children[::2], children[1::2], strict=False)
        ]
    for name, group in groupby(children, key=lambda child: child[0]):
        values = [value for _, child in group if (value := _value(child))]
        if values:
            pairs.append((name, values[0] if len(values) == 1 else values))
    text = "" if children else _said(element.text or "")
    if not (text or pairs) and (name := etree.QName(element).localname) in ("true", "false"):  # as in Apple's lists
        text = name
    return (*pairs, ("text", text)) if text and pairs else tuple(pairs) or text


def _said(text: str) -> str:
    """Text on one line; that of HTML where it is such; "" where only programs read it."""
    tags = _TAG.findall(text)
    is_html = all(name in _ELEMENTS for _, name in tags) and any(end or name in _UNCLOSED for end, name in tags)
    if is_html:
        out = TextBuilder()
        with suppress(UnreadableError):
            write_markup(b"\xef\xbb\xbf" + text.encode(), out)
            text = out.build()
    text = " ".join(text.split())
    is_data = len(text) > _LONGEST_WORD and " " not in text and text.isascii() and "://" not in text
    return "" if is_data else text


# ---- EPUB -----------------------------------------------------------------------------------------------------------
_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"


def read_book(data: bytes, _name: str) -> ReadText:
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
    return ReadText(one_line(package.findtext("{*}metadata/{*}title") or "") or title, out.build(NO_TEXT))


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
