"""A provider of searches, and pages in passages."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from paceline.errors import ConfigError, WebError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.parsing.process import ParserPool
from paceline.rag.prompt import MAX_QUERY
from paceline.rag.web import MAX_ANSWER_BYTES, MAX_SNIPPET, MAX_TITLE, SearxngSearch, WebPage, WebResult, read_page
from tests.rag.parsing.made import pdf, shown
from tests.rag.web.site import PRIVATE, Site, fetcher, leading_to, reply, usual_tls

pytestmark = pytest.mark.anyio

MILL = {"url": "https://mill.example/", "title": "The mill", "content": "It is red.", "engine": "a", "score": 1.5}
BARN = {"url": "http://barn.example/x?y=1", "title": None, "content": None}


def searxng(site: Site, *, timeout_s: float = 10.0) -> SearxngSearch:
    return SearxngSearch(f"http://{PRIVATE}:{site.port}", timeout_s=timeout_s, tls=usual_tls())


def answers(site: Site, answer: object, path: str = "/search") -> SearxngSearch:
    """A provider whose server gives this answer: bytes as they are, anything else as JSON."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    site.pages[path] = reply(body, "application/json")
    return searxng(site)


def fields(site: Site) -> dict[str, list[str]]:
    return parse_qs(urlsplit(site.paths[-1]).query)


async def test_results_come_in_order_and_no_more_than_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:9")
    provider = answers(site, {"query": "q", "results": [MILL, BARN, MILL, BARN], "answers": [], "infoboxes": []})
    expected = [
        WebResult("The mill", "https://mill.example/", "It is red."),
        WebResult("http://barn.example/x?y=1", "http://barn.example/x?y=1", ""),
    ]
    assert await provider.search("red  mill\n& barn", 10) == expected
    assert fields(site) == {"q": ["red mill & barn"], "format": ["json"]}
    assert await provider.search("red mill", 1) == expected[:1]


async def test_the_operators_path_and_password_are_used(site: Site) -> None:
    site.pages["/searx/search"] = reply(gzip.compress(b'{"results": []}'), "application/json", Content_Encoding="gzip")
    url = f"http://ann:secret@{PRIVATE}:{site.port}/searx/"
    assert await SearxngSearch(url).search("mill", 3) == []
    assert f"Basic {base64.b64encode(b'ann:secret').decode()}" in site.requests[0]
    site.pages.clear()
    with pytest.raises(WebError, match="status 404") as refused:
        await SearxngSearch(url).search("mill", 3)
    assert "secret" not in str(refused.value)


async def test_malformed_results_are_left_out(site: Site) -> None:
    results = [
        None, 7, [], "url", {}, {"url": 7}, {"url": None}, {"title": "no url"}, {"url": "javascript:alert(1)"},
        {"url": "ftp://a.example/"}, {"url": "http://a.example/" + "a" * 3000}, {"url": "http://a.example/\nb"},
        {"url": "http://a.example/\u202eb"}, MILL, {"url": "http://b.example/", "title": [], "content": "x"},
    ]  # fmt: skip
    found = await answers(site, {"results": results}).search("mill", 20)
    assert [result.url for result in found] == ["https://mill.example/"]
    body = b'{"results": [{"url": 7, "title": "\xff"}, "\xff", {"url": "http://a.example/\\ud800"}, %s]}'
    found = await answers(site, body % json.dumps(MILL).encode()).search("mill", 20)
    assert [result.url for result in found] == ["https://mill.example/"]


async def test_text_of_results_is_one_short_line(site: Site) -> None:
    odd = {"url": " http://a.example/ ", "title": "a\x1b[2J\n b" * 999, "content": "\u202ec\r\nd " * 9999}
    (result,) = await answers(site, {"results": [odd]}).search("mill", 20)
    assert result.url == "http://a.example/"
    assert len(result.title) <= MAX_TITLE and len(result.snippet) <= MAX_SNIPPET
    assert result.title.isprintable() and result.snippet.startswith("c d c d")


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"<html>rate limited", b"{", b"[]", b"null", b'{"results": {}}', b'{"results": null}', b'{"query": "a"}',
        b'{"results": [{"url": "http://a.example/"}', b"\xff\xfe", b"[" * 100_000, b'{"results": [' + b"[" * 100_000,
        b'{"results": []} and more',
    ],
)  # fmt: skip
async def test_an_answer_that_is_not_searxngs_gives_a_sentence(answer: bytes, site: Site) -> None:
    with pytest.raises(WebError, match="does not answer with SearXNG's JSON"):
        await answers(site, answer).search("mill", 5)


REFUSALS = {"403 Forbidden": "add `json` to", "429 Too Many": "limiter", "500 Oh": "is it SearXNG"}


@pytest.mark.parametrize("status", [*REFUSALS, "302 Found"])
async def test_a_refusal_says_what_to_do_and_a_redirect_is_not_followed(status: str, site: Site) -> None:
    site.pages["/search"] = leading_to("/elsewhere", status)
    with pytest.raises(WebError, match=REFUSALS.get(status, "status 302")):
        await searxng(site).search("mill", 5)
    assert len(site.requests) == 1


async def test_engines_that_were_silent_are_not_taken_for_an_empty_web(site: Site) -> None:
    silent = [["goose", "timeout"], ["duck", "access denied"]]
    with pytest.raises(WebError, match="no answer from goose, duck"):
        await answers(site, {"results": [], "unresponsive_engines": silent}).search("mill", 5)
    assert len(await answers(site, {"results": [MILL], "unresponsive_engines": silent}).search("mill", 5)) == 1
    for odd in ([], None, 7, [7], [[]], {"a": 1}):
        assert await answers(site, {"results": [], "unresponsive_engines": odd}).search("mill", 5) == []


async def test_an_answer_that_is_too_long_or_too_late_is_left(site: Site) -> None:
    with pytest.raises(WebError, match="more than 2048 KiB"):
        await answers(site, b" " * (MAX_ANSWER_BYTES + 1)).search("mill", 5)

    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await writer.drain()

    site.pages["/search"] = silent
    with pytest.raises(WebError, match=r"takes more than 0\.2 s|cannot be reached"):
        await searxng(site, timeout_s=0.2).search("mill", 5)


async def test_a_server_that_is_not_there_gives_a_sentence(site: Site) -> None:
    with pytest.raises(WebError, match="cannot be reached"):
        await SearxngSearch(f"http://[::1]:{site.port}").search("mill", 5)  # nothing listens on IPv6


async def test_a_query_is_text_and_not_a_command(site: Site) -> None:
    provider = answers(site, {"results": [MILL]})
    await provider.search("!!g !images red ! mill! \x00", 5)
    assert fields(site)["q"] == ["g images red mill!"]
    for nothing in ("", " \n", "!!"):
        assert await provider.search(nothing, 5) == []
    assert await provider.search("mill", 0) == []
    with pytest.raises(WebError, match="at most"):
        await provider.search("a" * (MAX_QUERY + 1), 5)
    assert len(site.requests) == 1


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://a.example", "http://", "http://127.0.0.999", "unix:/a"])
def test_a_url_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="must be like"):
        SearxngSearch(url)


# ---- pages in passages ----------------------------------------------------------------------------------------------
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
    ("charset", "declared", "written"),
    [
        ("; charset=windows-1251", "", "cp1251"),
        ("", "windows-1251", "cp1251"),
        ("; charset=windows-1251", "latin-1", "cp1251"),
        ("; charset=windows-1251", "latin-1", "utf-16"),
    ],
)
async def test_a_byte_order_mark_goes_before_the_servers_character_set_and_that_before_the_pages(
    charset: str, declared: str, written: str, site: Site, parsers: ParserPool
) -> None:
    word = "\u043c\u0435\u043b\u044c\u043d\u0438\u0446\u0430"
    meta = f'<meta charset="{declared}">' if declared else ""
    page = await read(site, parsers, f"<html><head>{meta}</head><p>{word}".encode(written), f"text/html{charset}")
    assert page.passages[0].text == word


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
