"""Which addresses are public, and which URLs are fetched as far as their text tells."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.addresses import Address, parsed_address
from paceline.errors import WebError
from paceline.rag.web import MAX_URL, is_public, shown, target_of

NOT_PUBLIC = (
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254", "168.63.129.16",
    "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1",
    "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "100::1", "2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1", "2002:7f00:1::1", "2002:a00:1::", "2002:808:808::1", "3fff::1", "4000::1", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
)  # fmt: skip
PUBLIC = (
    "1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.128.0.1", "168.63.129.15", "223.255.255.255",
    "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e",
)  # fmt: skip


@pytest.mark.parametrize("address", [*NOT_PUBLIC, *PUBLIC])
def test_an_address_that_is_public_is_told_from_one_that_is_not(address: str) -> None:
    parsed = parsed_address(address)
    assert parsed is not None and is_public(parsed) is (address in PUBLIC)


@example(ipaddress.IPv6Address("::ffff:10.0.0.1"))
@given(st.ip_addresses())
def test_no_public_address_is_special_to_the_standard_library(address: Address) -> None:
    if is_public(address) and address not in ipaddress.ip_network("64:ff9b::/96"):
        assert address.is_global
        assert not (address.is_multicast or address.is_reserved or address.is_link_local or address.is_loopback)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://example.org", "example.org", 80),
        ("HTTPS://Example.ORG.:443/a?b#c", "example.org", 443),
        ("http://b\u00fccher.example/", "xn--bcher-kva.example", 80),
        ("http://a_b.example:80/%2e%2e/", "a_b.example", 80),
        ("https://[2606:4700::1111]/", "2606:4700::1111", 443),
        ("http://8.8.8.8/", "8.8.8.8", 80),
        ("http://2130706433.example/", "2130706433.example", 80),
    ],
)
def test_a_usual_url_is_fetched(url: str, host: str, port: int) -> None:
    target = target_of(url)
    assert (target.host, target.port) == (host, port)
    assert "#" not in str(target.url)


@pytest.mark.parametrize(
    "url",
    [
        "", "example.org", "//example.org/", "/etc/passwd", "file:///etc/passwd", "ftp://example.org/",
        "data:text/html,a", "gopher://example.org/", "javascript:alert(1)", "http:///path", "http://", "http://user@example.org/",
        "http://user:password@example.org/", "http://example.org@127.0.0.1/", "http://example.org\\@127.0.0.1/",
        "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/", "http://0177.0.0.1/", "http://127.1/", "http://0/",
        "http://127.0.0.01/", "http://1.2.3.4.5/", "http://example.0x7f/", "http://[fe80::1%25eth0]/",
        "http://[fe80::1%eth0]/", "http://[::1", "http://[v1.a]/", "http://exa mple.org/", "http://exa\nmple.org/", "http://example.org/\0",
        "http://%31%32%37.0.0.1/", "http://127.0.0.1%00.example.org/", "http://-a.example/", "http://a..example/",
        "http://example.org:22/", "http://example.org:8080/", "http://example.org:0/", "http://example.org:x/",
        "http://\uff11\uff12\uff17.0.0.1/", f"http://{'a' * 64}.example/", f"http://{'a.' * 127}example/",
        f"http://example.org/{'a' * MAX_URL}",
    ],
)  # fmt: skip
def test_any_other_url_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(WebError) as refused:
        target_of(url)
    text = str(refused.value)
    assert text.endswith(".") and text.isprintable() and len(text) < 400


def test_no_url_is_shown_with_its_password_or_whole() -> None:
    assert shown("ftp://ann:secret@example.org/") == "ftp://example.org/"
    assert len(shown("http://example.org/" + "a" * 5000)) < 210
