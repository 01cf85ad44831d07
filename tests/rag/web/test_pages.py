"""Pages in passages: parsed by the process that parses uploads, and divided as documents are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.errors import WebError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.parsing.process import ParserPool
from paceline.rag.web import WebPage, read_page
from tests.rag.parsing.made import pdf, shown
from tests.rag.web.site import Site, fetcher, reply

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def parsers() -> Iterator[ParserPool]:
    pool = ParserPool(1)
    yield pool
    pool.close()


async def read(site: Site, parsers: ParserPool, body: bytes, content_type: str, *, max_passages: int = 9) -> WebPage:
    site.pages["/"] = reply(body, content_type)
    url = f"http://pages.test:{site.port}/"
    return await read_page(url, fetcher(site), parsers, HashEmbedder().count, most=max_passages)


async def test_a_page_gives_titled_passages_of_what_it_shows(site: Site, parsers: ParserPool) -> None:
    html = b"<title>Mills</title><script>no()</script><h1>Red</h1><p>The mill is red.<img src='http://127.0.0.1/'>"
    page = await read(site, parsers, html, "text/html")
    assert (page.url, page.title) == (f"http://pages.test:{site.port}/", "Mills")
    assert [passage.titled for passage in page.passages] == ["Mills\n# Red\n\nThe mill is red."]
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    ("charset", "declared"),
    [("; charset=windows-1251", ""), ("", "windows-1251"), ("; charset=windows-1251", "latin-1")],
)
async def test_the_servers_character_set_goes_before_the_pages(
    charset: str, declared: str, site: Site, parsers: ParserPool
) -> None:
    word = "\u043c\u0435\u043b\u044c\u043d\u0438\u0446\u0430"
    meta = f'<meta charset="{declared}">' if declared else ""
    page = await read(site, parsers, f"<html><head>{meta}</head><p>{word}".encode("cp1251"), f"text/html{charset}")
    assert page.passages[0].text == word


async def test_a_byte_order_mark_goes_before_everything(site: Site, parsers: ParserPool) -> None:
    page = await read(site, parsers, "<p>M\u00fchle".encode("utf-16"), "text/html; charset=windows-1251")
    assert page.passages[0].text == "M\u00fchle"


async def test_other_kinds_of_documents_are_read_as_uploads_are(site: Site, parsers: ParserPool) -> None:
    made = pdf([shown("The mill is red."), shown("The barn is grey.")], "Farm")
    page = await read(site, parsers, made, "application/pdf")
    assert page.title == "Farm"
    assert "The barn is grey." in page.passages[-1].text
    assert (await read(site, parsers, b"# Mills\n\nRed.", "text/markdown; charset=utf-8")).title == "Mills"


async def test_a_long_page_is_cut(site: Site, parsers: ParserPool) -> None:
    text = "\n\n".join(f"Paragraph {i}. " + "word " * 150 for i in range(5)).encode()
    page = await read(site, parsers, text, "text/plain", max_passages=3)
    assert len(page.passages) == 3


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(b"%PDF-1.4 no more", "application/pdf"), (b"", "text/html"), (b"<script>a()</script>", "text/html"),
     (b"\x89PNG\r\n\x1a\n", "text/html"), (bytes(range(256)) * 9, "text/plain")],
)  # fmt: skip
async def test_a_page_that_cannot_be_read_gives_a_sentence(
    body: bytes, content_type: str, site: Site, parsers: ParserPool
) -> None:
    with pytest.raises(WebError, match=r"^pages\.test\.\w+ .*\.$"):
        await read(site, parsers, body, content_type)
