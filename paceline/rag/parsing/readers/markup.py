"""HTML to text: headings, lists and tables as Markdown, everything that is not shown left out.

libxml2 reads it, without network, DTDs or entities of the document's own. Not handled: styles that hide elements,
frames, and what scripts would write.
"""

from __future__ import annotations

from lxml import etree

from paceline.rag.parsing.readers.content import Content, TextBuilder, UnreadableError, one_line
from paceline.rag.parsing.readers.decoding import decode

_HIDDEN = frozenset({
    "audio", "button", "canvas", "head", "iframe", "math", "noscript", "object", "script", "select", "style", "svg",
    "template", "title", "video",
})  # fmt: skip
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt", "fieldset",
    "figcaption", "figure", "footer", "form", "header", "hgroup", "hr", "main", "menu", "nav", "ol", "p", "section",
    "summary", "table", "tbody", "tfoot", "thead", "ul",
})  # fmt: skip
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_META_WITHIN = 4096  # bytes; browsers look for a character set in the first 1,024


def read(data: bytes, name: str) -> Content:
    del name
    out = TextBuilder()
    title = write_markup(data, out)
    if not out.num_characters:
        raise UnreadableError("shows no text; if scripts write its text, save it from a browser as PDF")
    return Content(title, out.build())


def write_markup(data: bytes, out: TextBuilder) -> str:
    """Append what an HTML document shows, and return its title."""
    text = decode(data, declared_charset(data))
    if text.lstrip().startswith("<?xml"):  # its encoding is no longer true, and the parser would believe it
        text = text[text.find(">") + 1 :]
    parser = etree.HTMLParser(
        encoding="utf-8", no_network=True, remove_comments=True, remove_pis=True, huge_tree=False, recover=True
    )
    root = etree.fromstring(text.encode("utf-8", "replace"), parser)
    if root is None:
        return ""
    _write(root, out)
    heading = root.find(".//h1")
    return one_line(root.findtext("head/title") or "") or (
        "" if heading is None else one_line("".join(heading.itertext()))
    )


def declared_charset(data: bytes) -> str:
    """The character set of a `meta` element or an XML declaration, as written; "" for none."""
    head = data[:_META_WITHIN].lower()
    for mark in (b"charset=", b"encoding="):
        before, found, rest = head.partition(mark)
        if found and (b"<meta" in before or before.lstrip().startswith(b"<?xml")):
            rest = rest.lstrip(b"\"' ")[:40]
            end = next((i for i, byte in enumerate(rest) if byte in b"\"' />;?\n"), len(rest))
            return rest[:end].decode("ascii", "replace")
    return ""


def _write(root: etree._Element, out: TextBuilder) -> None:
    """Walk the tree without recursion, since it may be deep."""
    verbatim = 0  # depth of `pre`
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        tag = element.tag if isinstance(element.tag, str) else ""
        if event == "start":
            if not tag or tag in _HIDDEN:
                walk.skip_subtree()
                continue
            _begin(tag, element, out)
            verbatim += tag == "pre"
            _put(element.text, verbatim, out)
        else:
            if tag not in _HIDDEN:
                verbatim -= tag == "pre"
                _end(tag, out)
            if element is not root:
                _put(element.tail, verbatim, out)


def _put(text: str | None, verbatim: int, out: TextBuilder) -> None:
    if text:
        (out.verbatim if verbatim else out.text)(text)


def _begin(tag: str, element: etree._Element, out: TextBuilder) -> None:
    if tag in _HEADINGS:
        out.paragraph(_HEADINGS[tag])
    elif tag in _BLOCKS or tag == "pre":
        out.paragraph()
    elif tag == "li":
        out.line("- ")
    elif tag in ("br", "tr"):
        out.line()
    elif tag in ("td", "th") and element.getprevious() is not None:
        out.text(" | ")


def _end(tag: str, out: TextBuilder) -> None:
    if tag in _HEADINGS or tag in _BLOCKS or tag == "pre":
        out.paragraph()
    elif tag in ("li", "tr"):
        out.line()
