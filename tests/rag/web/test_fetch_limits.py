"""Answers that would cost too much, or are none: each ends in a sentence."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import pytest

from paceline.errors import WebError
from paceline.rag.web import FetchLimits
from tests.rag.web.site import Names, Site, fetcher, leading_to, reply

pytestmark = pytest.mark.anyio

SMALL = FetchLimits(body_bytes=1 << 20)
SHORT = FetchLimits(total_s=0.2)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


async def fetched(site: Site, limits: FetchLimits = SMALL) -> bytes:
    return (await fetcher(site, limits=limits).fetch(f"http://pages.test:{site.port}/")).data


async def test_a_compressed_page_is_unpacked(site: Site) -> None:
    text = b"The mill is red. " * 9000
    site.pages["/"] = reply(gzip.compress(text), Content_Encoding="gzip")
    assert await fetched(site) == text
    assert "Accept-Encoding: gzip\r\n" in site.requests[0]


async def test_a_page_of_exactly_the_limit_is_read(site: Site) -> None:
    for body, encoding in ((b"a" * (1 << 20), ""), (gzip.compress(b"a" * (1 << 20)), "gzip")):
        site.pages["/"] = reply(body, Content_Encoding=encoding)
        assert len(await fetched(site)) == 1 << 20


async def test_a_bomb_is_not_unpacked_beyond_the_limit(site: Site) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 1 << 18
    site.pages["/"] = reply(bomb, Content_Encoding="gzip")
    tracemalloc.start()
    try:
        with pytest.raises(WebError, match="more than 1024 KiB"):
            await fetched(site)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


async def test_a_bomb_in_a_bomb_is_refused(site: Site) -> None:
    site.pages["/"] = reply(gzip.compress(gzip.compress(bytes(1 << 16))), Content_Encoding="gzip, gzip")
    with pytest.raises(WebError, match="compressed in a way"):
        await fetched(site)


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n\r\n", b"\r\n"])
async def test_a_body_without_end_is_left(framing: bytes, site: Site) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + framing)
        while True:
            writer.write(b"10000\r\n" + b"a" * 0x10000 + b"\r\n" if b"chunked" in framing else b"a" * 0x10000)
            await writer.drain()

    site.pages["/"] = endless
    with pytest.raises(WebError, match="more than 1024 KiB"):
        await fetched(site)
    await site.left.wait()


@pytest.mark.parametrize(
    "start", [b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\nslow", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
async def test_a_server_that_falls_silent_is_left(start: bytes, site: Site) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()

    site.pages["/"] = silent
    with pytest.raises(WebError, match=r"takes more than 0\.2 s"):
        await fetched(site, SHORT)


@pytest.mark.parametrize("drop", [b"a", b"HTTP/1.1 100 Continue\r\n\r\n", b"1\r\na\r\n"])
async def test_a_server_that_sends_drop_by_drop_is_left(drop: bytes, site: Site) -> None:
    async def dripping(writer: asyncio.StreamWriter) -> None:
        if drop[:1].islower():
            writer.write(HEAD + b"\r\n")
        elif drop[:1].isdigit():
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(drop)
            await writer.drain()
            await asyncio.sleep(0)

    site.pages["/"] = dripping
    with pytest.raises(WebError, match=r"takes more than 0\.2 s|more than 8192 KiB"):
        await fetched(site, SHORT)


async def test_redirects_and_names_share_one_limit_of_time(site: Site) -> None:
    class Never(Names):
        async def __call__(self, host: str, port: int) -> list[str]:
            if host == "slow.test":
                await asyncio.Event().wait()
            return list(await super().__call__(host, port))

    site.pages["/"] = leading_to(f"http://slow.test:{site.port}/")
    with pytest.raises(WebError, match=r"takes more than 0\.2 s"):
        await fetcher(site, Never(pages_test=[["127.0.0.2"]]), SHORT).fetch(f"http://pages.test:{site.port}/")


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"HTTP/1.1 " + b"2" * 200_000,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        HEAD + b"Content-Length: 10\r\n\r\nshort",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\nxyz",
        b"",
    ],
    ids=range(10),
)
async def test_what_is_no_http_is_refused(answer: bytes, site: Site) -> None:
    async def hang_up(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    site.pages["/"] = hang_up
    with pytest.raises(WebError, match="is not answered as HTTP asks"):
        await fetched(site)


@pytest.mark.parametrize("cut", [0, 5, 30])
async def test_a_compressed_page_that_is_damaged_or_cut_is_refused(cut: int, site: Site) -> None:
    packed = gzip.compress(b"The mill is red. It has been so for years.")
    damaged = packed[:12] + b"\xff\xff" + packed[14:]
    for body in (packed[:cut], damaged, b"not packed"):
        site.pages["/"] = reply(body, Content_Encoding="gzip")
        with pytest.raises(WebError, match=r"ends in the middle|compressed and damaged"):
            await fetched(site)


@pytest.mark.parametrize(
    "content_type", ["", "image/png", "application/octet-stream", "video/mp4", "text/html, image/png", "text", "\x7f"]
)
async def test_a_type_that_is_not_read_is_refused_before_its_body(content_type: str, site: Site) -> None:
    body_is_wanted = asyncio.Event()

    async def head_only(writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"", content_type, Content_Length="1000000"))
        await body_is_wanted.wait()

    site.pages["/"] = head_only
    fetch = asyncio.create_task(fetched(site))
    with pytest.raises(WebError, match="no page or document"):
        await fetch
    body_is_wanted.set()


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial", "304 Not Modified", "403 No", "500 Oh", "999 Odd"])
async def test_an_answer_that_is_no_page_is_refused(status: str, site: Site) -> None:
    site.pages["/"] = reply(b"", status=status, Content_Length="")
    with pytest.raises(WebError, match=f"status {status[:3]}|as HTTP asks"):
        await fetched(site)
