"""Fetching pages: what is sent, where it goes, and that whatever is not public is never connected to."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import WebError
from paceline.rag.web import FetchLimits, PageFetcher, SystemResolver
from tests.rag.web.site import PRIVATE, PUBLIC, Names, Site, certificate, fetcher, leading_to, reply, serving, usual_tls
from tests.reliability.test_r26_urls import HOSTS

pytestmark = pytest.mark.anyio

NOT_PUBLIC = (
    *HOSTS, "[::]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001::1]", "[fe80::1%25lo]",
    "[fd00::1]", "0x7f.0.0.1", "127.0.0.1.", "127.0.0.01", "017700000001", "10.0.0.1", "100.64.0.1", "intranet",
    "unknown.test",
)  # fmt: skip
NAMES = {
    "localhost": [[PRIVATE]],
    "intranet": [["10.0.0.7"]],
    "127_0_0_1_nip_io": [[PRIVATE]],
    "metadata_google_internal": [["169.254.169.254"]],
}


async def test_a_page_is_fetched_by_the_address_of_its_name_and_asked_for_by_its_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://{PRIVATE}:{site.port}")
    site.pages["/a"] = reply(b"<p>The mill is red.", "text/html; charset=ISO-8859-1", Set_Cookie="a=b")
    names = Names(pages_test=[[PUBLIC]])
    page = await fetcher(site, names).fetch(f"http://pages.test:{site.port}/a?b=c#d")
    assert (page.data, page.name, page.charset) == (b"<p>The mill is red.", "pages.test.html", "ISO-8859-1")
    assert page.url == f"http://pages.test:{site.port}/a?b=c"
    (head,) = site.requests
    assert head.startswith("GET /a?b=c HTTP/1.1\r\n")
    assert f"\r\nHost: pages.test:{site.port}\r\n" in head
    assert site.addresses == {PUBLIC}
    assert names.asked == ["pages.test"]


@pytest.mark.parametrize("host", NOT_PUBLIC)
async def test_no_connection_is_made_to_what_is_not_public(host: str, site: Site) -> None:
    for where in (f"http://{host}:{site.port}/", f"https://{host}:{site.port}/latest/meta-data/"):
        site.pages["/lead"] = leading_to(where)
        public = PageFetcher(resolve=Names(**NAMES), ports={site.port}, tls=usual_tls())
        for way, url in ((public, where), (fetcher(site), f"http://pages.test:{site.port}/lead")):
            with pytest.raises(WebError) as refused:
                await way.fetch(url)
            assert not any(
                address in str(refused.value) for address in ("10.0.0.7", "169.254.169.254") if address != host
            )
    assert site.addresses == {PUBLIC}
    assert site.paths == ["/lead", "/lead"]


@pytest.mark.parametrize("url", ["http://2130706433/", "http://[fe80::1%25lo]/", "ftp://pages.test/"])
async def test_an_unusual_host_is_not_even_looked_up(url: str, site: Site) -> None:
    names = Names()
    with pytest.raises(WebError):
        await fetcher(site, names).fetch(url)
    assert not names.asked


@pytest.mark.parametrize("addresses", [[PRIVATE], [PUBLIC, PRIVATE], [PUBLIC, "::1"], [PUBLIC, "nonsense"], []])
async def test_a_name_with_any_private_address_is_refused(addresses: list[str], site: Site) -> None:
    with pytest.raises(WebError, match=r"not at a public address|is not known"):
        await fetcher(site, Names(pages_test=[addresses])).fetch(f"http://pages.test:{site.port}/")
    assert not site.addresses


async def test_the_system_resolver_is_checked_as_well(site: Site) -> None:
    with pytest.raises(WebError, match="not at a public address"):
        await PageFetcher(ports={site.port}).fetch(f"http://localhost:{site.port}/")
    assert await SystemResolver(1)("name.invalid", 80) == []
    assert not site.addresses


async def test_a_name_that_changes_its_address_is_connected_to_where_it_was_checked(site: Site) -> None:
    site.pages["/"] = reply(b"public")
    names = Names(pages_test=[[PUBLIC], [PRIVATE]])
    fetch = fetcher(site, names).fetch
    assert (await fetch(f"http://pages.test:{site.port}/")).data == b"public"
    assert names.asked == ["pages.test"]
    with pytest.raises(WebError, match="not at a public address"):
        await fetch(f"http://pages.test:{site.port}/")
    assert site.addresses == {PUBLIC}


async def test_a_name_that_changes_its_address_before_a_redirect_to_itself_is_refused(site: Site) -> None:
    site.pages["/"] = leading_to("/again")
    names = Names(pages_test=[[PUBLIC], [PRIVATE]])
    with pytest.raises(WebError, match="not at a public address"):
        await fetcher(site, names).fetch(f"http://pages.test:{site.port}/")
    assert names.asked == ["pages.test", "pages.test"]
    assert (site.addresses, site.paths) == ({PUBLIC}, ["/"])


async def test_redirects_are_followed_without_cookies_or_referrer(site: Site) -> None:
    site.pages["/1"] = reply(status="301 Moved", Location="2", Set_Cookie="secret=1")
    site.pages["/2"] = leading_to(f"//other.test:{site.port}/3", "307 Temporary Redirect")
    site.pages["/3"] = reply(b"here", "text/plain")
    page = await fetcher(site, Names(pages_test=[[PUBLIC]], other_test=[[PUBLIC]])).fetch(
        f"http://pages.test:{site.port}/1"
    )
    assert (page.data, page.url, page.name) == (b"here", f"http://other.test:{site.port}/3", "other.test.txt")
    assert f"Host: other.test:{site.port}" in site.requests[-1]
    assert not any(word in head.lower() for head in site.requests for word in ("cookie", "referer", "authorization"))


async def test_a_loop_of_redirects_ends(site: Site) -> None:
    site.pages["/"] = leading_to("/")
    with pytest.raises(WebError, match="leads on more than 5 times"):
        await fetcher(site).fetch(f"http://pages.test:{site.port}/")
    assert len(site.requests) == 6


@pytest.mark.parametrize(
    "location", ["", "http://[", "http://exa mple/", "file:///etc/passwd", "http://pages.test:22/"]
)
async def test_a_redirect_to_no_usual_url_is_refused(location: str, site: Site) -> None:
    site.pages["/"] = leading_to(location)
    with pytest.raises(WebError):
        await fetcher(site).fetch(f"http://pages.test:{site.port}/")
    assert len(site.requests) == 1


async def test_another_address_is_tried_where_one_cannot_be_reached(site: Site) -> None:
    site.pages["/"] = reply(b"here")
    names = Names(pages_test=[["::1", PUBLIC]])  # nothing listens on IPv6
    both = PageFetcher(resolve=names, allowed=lambda _: True, ports={site.port})
    assert (await both.fetch(f"http://pages.test:{site.port}/")).data == b"here"
    with pytest.raises(WebError, match="cannot be reached"):
        await PageFetcher(resolve=Names(pages_test=[["::1"]]), allowed=lambda _: True, ports={site.port}).fetch(
            f"http://pages.test:{site.port}/"
        )


async def test_the_certificate_must_be_for_the_name(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, "pages.test")
    async with serving(server) as site:
        site.pages["/"] = reply(b"safe")
        names = Names(pages_test=[[PUBLIC]], other_test=[[PUBLIC]])
        page = await fetcher(site, names, tls=client).fetch(f"https://pages.test:{site.port}/")
        assert page.data == b"safe"
        assert site.names == ["pages.test"]
        assert f"Host: pages.test:{site.port}" in site.requests[0]
        for url, tls in ((f"https://other.test:{site.port}/", client), (f"https://pages.test:{site.port}/", None)):
            with pytest.raises(WebError, match="has no valid certificate"):
                await fetcher(site, names, tls=tls).fetch(url)
        assert len(site.requests) == 1


async def test_an_address_in_a_url_is_verified_as_an_address(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, PUBLIC)
    async with serving(server) as site:
        site.pages["/"] = reply(b"safe")
        assert (await fetcher(site, tls=client).fetch(f"https://{PUBLIC}:{site.port}/")).data == b"safe"


async def test_https_does_not_lead_to_http(tmp_path: Path, site: Site) -> None:
    server, client = certificate(tmp_path, "pages.test")
    async with serving(server) as safe:
        site.pages["/up"] = leading_to(f"https://pages.test:{safe.port}/")
        safe.pages["/"] = leading_to(f"http://pages.test:{site.port}/down")
        both = PageFetcher(
            resolve=Names(pages_test=[[PUBLIC]]),
            allowed=lambda address: str(address) == PUBLIC,
            ports={site.port, safe.port},
            tls=client,
        )
        with pytest.raises(WebError, match="leads from https to http"):
            await both.fetch(f"http://pages.test:{site.port}/up")
        assert (site.paths, safe.paths) == (["/up"], ["/"])


async def test_only_so_many_pages_are_fetched_at_once(site: Site) -> None:
    class Counting(Names):
        together = most = 0

        async def __call__(self, host: str, port: int) -> Sequence[str]:
            self.together += 1
            for _ in range(20):  # all tasks that may begin have begun
                await asyncio.sleep(0)
            self.most = max(self.most, self.together)
            self.together -= 1
            return await super().__call__(host, port)

    site.pages["/"] = reply(b"here")
    names = Counting(pages_test=[[PUBLIC]])
    limited = fetcher(site, names, FetchLimits(at_once=2))
    pages = await asyncio.gather(*(limited.fetch(f"http://pages.test:{site.port}/") for _ in range(6)))
    assert len(pages) == 6
    assert names.most == 2


async def test_plain_http_on_a_port_of_tls_and_the_reverse_are_refused(tmp_path: Path, site: Site) -> None:
    server, _ = certificate(tmp_path, "pages.test")
    async with serving(server) as safe:
        with pytest.raises(WebError):
            await fetcher(safe).fetch(f"http://pages.test:{safe.port}/")
    with pytest.raises(WebError, match="cannot be reached"):
        await fetcher(site, limits=FetchLimits(connect_s=0.2)).fetch(f"https://pages.test:{site.port}/")


# ---- answers that would cost too much, or are none: each ends in a sentence -----------------------------------------
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
