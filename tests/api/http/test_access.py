"""Access: keys, the devices bound to them, hosts and origins; and secrets that are never logged."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from paceline.api.app import create_app
from paceline.api.http import server as server_module
from paceline.api.http.admission import DoorLimits, is_local_host, is_local_origin
from paceline.api.http.auth import Keyring, StoredKey, check_exposure, parse_keys
from paceline.errors import ConfigError, StorageError
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import (
    FreshKeys,
    Script,
    ScriptedService,
    client_of,
    connected,
    heard,
    request,
    running,
    serving,
)

CHAT = "/v1/chat/completions"

# ---- keys -----------------------------------------------------------------------------------------------------------
KEYS = {"sk-open": None, "sk-phone": "phone"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[tuple[ScriptedService, str]]:
    service = ScriptedService()
    with serving(service, KEYS) as url:
        yield service, url


def test_a_wrong_key_is_none_whatever_is_asked(keyed: tuple[ScriptedService, str]) -> None:
    """Refusals of every route are in `tests/api/test_openapi.py`."""
    for header in ("", "Bearer", "Bearer wrong", "Basic sk-open", "sk-open", "Bearer sk-open2", "Bearer schlüssel鍵"):
        for method, path in (("POST", CHAT), ("GET", "/x")):
            headers = {b"authorization": header.encode()}  # whatever bytes they are
            response = httpx.request(method, keyed[1] + path, headers=headers, content=b"not even JSON")  # type: ignore[arg-type]
            assert fault(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    assert request("GET", keyed[1] + "/v1/models", headers={"authorization": "bearer  sk-open"}).status_code == 200


def test_a_bound_key_is_joined_by_its_device_and_no_other(keyed: tuple[ScriptedService, str]) -> None:
    service, url = keyed
    with client_of(url, "sk-phone") as http:
        assert post(http).status_code == 200
        assert post(http, paceline={"device": "phone"}).status_code == 200
        assert fault(post(http, paceline={"device": "laptop"}), 403)["param"] == "paceline.device"
    with client_of(url, "sk-open") as http:
        assert post(http, paceline={"device": "laptop"}).status_code == 200
    assert [asked.joining.device for asked in service.requests[-3:]] == ["phone", "phone", "laptop"]


def joined(service: ScriptedService) -> tuple[str | None, bool, bool, str]:
    """Facts of the last request: its device, whether it may be any, whether it may be named, who asks."""
    asked = service.requests[-1]
    return asked.joining.device, asked.joining.any_device, asked.joining.names_device, asked.account.asker


def test_a_key_that_is_bound_to_no_device_is_joined_by_the_one_it_names_if_it_may() -> None:
    service, keys = ScriptedService(), {name: f"sk-{name}" for name in ("all", "chats", "devices")}
    scopes = {"all": None, "chats": frozenset({"chat"}), "devices": frozenset({"chat", "devices"})}
    stored = [
        StoredKey.of(hashlib.sha256(keys[name].encode()).digest(), scopes=scopes[name], until=None, name=name)
        for name in keys
    ]
    with running(create_app(service, keyring=Keyring({}, FreshKeys(*stored)))) as url:
        for name, key in keys.items():
            with client_of(url, key) as http:
                named = post(http, paceline={"device": "phone"})
                assert named.status_code == (403 if name == "chats" else 200), name
                if name == "chats":
                    assert "scope 'devices'" in fault(named, 403)["message"]
                assert post(http).status_code == 200
                assert joined(service) == (None, False, False, name)
    with serving(service) as url, client_of(url) as http:
        assert post(http, paceline={"device": "phone"}).status_code == 200
        assert joined(service) == ("phone", True, True, "")


def test_a_device_is_not_named_at_a_device() -> None:
    with serving(ScriptedService("device")) as url, client_of(url) as http:
        assert fault(post(http, paceline={"device": "phone"}))["param"] == "paceline.device"


def test_keys_are_parsed_with_their_device() -> None:
    assert parse_keys(["a", "b=phone", "c2Vj==", "d=e=tablet-2"]) == {
        "a": None,
        "b": "phone",
        "c2Vj==": None,
        "d=e": "tablet-2",
    }
    with pytest.raises(ConfigError):
        parse_keys(["a=phone", "a=laptop"])


def test_only_this_machine_may_be_served_without_keys() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_exposure(host, Keyring({}))
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(ConfigError, match="key"):
            check_exposure(host, Keyring({}))
        check_exposure(host, Keyring({"k": None}))


def test_a_key_that_no_client_could_send_is_refused_without_being_shown() -> None:
    for key in ("k\xe9y", "schl\xfcssel=phone", "\u9375", "a\x00b", "a\nb", "sk-\udcff"):
        with pytest.raises(ConfigError, match="Key 2 of api_keys") as refused:
            parse_keys(["fine", key])
        assert key not in str(refused.value)


# ---- origins --------------------------------------------------------------------------------------------------------
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,x-stainless-timeout"


def preflight(url: str, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": STAINLESS,
        "access-control-request-private-network": "true",
    }
    return request("OPTIONS", url + CHAT, headers=headers)


@pytest.mark.parametrize("origin", ["https://app.example.org", "http://localhost:3000", "app://obsidian.md"])
def test_a_preflight_needs_no_key_and_gets_back_what_it_asked_for(
    keyed: tuple[ScriptedService, str], origin: str
) -> None:
    response = preflight(keyed[1], origin)
    assert response.status_code == 204 and response.content == b""
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-headers"] == STAINLESS
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-private-network"] == "true"
    assert response.headers["x-request-id"]


EXTENSIONS = ("chrome-extension://abcdef", "moz-extension://12-34", "vscode-webview://x", "file://", "custom://x")


def test_without_keys_only_pages_of_this_machine_may_ask(url: str, service: ScriptedService) -> None:
    for origin in ("http://localhost:3000", "http://127.0.0.1:8001", "http://[::1]:1", "app://obsidian.md"):
        assert preflight(url, origin).status_code == 204
        assert request("POST", url + CHAT, json=BODY, headers={"origin": origin}).status_code == 200
    service.requests.clear()
    for origin in ("https://evil.example", "http://localhost.evil.example", "null", "http://[", "", *EXTENSIONS):
        assert preflight(url, origin).status_code == 403
        fault(request("POST", url + CHAT, json=BODY, headers={"origin": origin}), 403)
    assert not service.requests


def test_an_extension_may_ask_where_its_origin_is_allowed() -> None:
    allowed = DoorLimits(origins=frozenset({"chrome-extension://abcdef"}))
    with running(create_app(ScriptedService(), keyring=Keyring({}), limits=allowed)) as url:
        for origin in ("chrome-extension://abcdef", "Chrome-Extension://ABCDEF"):
            assert preflight(url, origin).status_code == 204
        assert preflight(url, "chrome-extension://abcdeg").status_code == 403


@pytest.mark.parametrize("absent", ["127.0.0.1", "::1"])
def test_whose_a_connection_is_can_be_told_by_either_loopback_address(
    monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    created = socket.create_server

    def without(address: tuple[str, int], *, family: socket.AddressFamily) -> socket.socket:
        if address[0] == absent:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return created(address, family=family)

    if absent == "127.0.0.1":
        try:
            created(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no ::1")
    monkeypatch.setattr(socket, "create_server", without)
    assert server_module.can_tell.__wrapped__()


def test_without_keys_only_the_user_who_started_it_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_module.can_tell(), "tests run on Linux"
    monkeypatch.setattr(server_module, "_welcome", lambda: {os.geteuid() + 1})
    for limits, keys, status in (
        (DoorLimits(), {}, 403),
        (DoorLimits(every_user=True), {}, 200),
        (DoorLimits(), {"sk-open": None}, 200),
    ):
        with running(create_app(ScriptedService(), keyring=Keyring(keys), limits=limits)) as url:
            with client_of(url, "sk-open") as http:
                for _ in range(2):
                    answer = http.get("/v1/models")
                    assert answer.status_code == status
            assert request("GET", url + "/healthz").status_code == 200, "open to all in any case"
            if status == 403:
                assert fault(answer, 403)["code"] == "user_not_allowed"


def test_a_connection_is_its_own_users_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()):
            server = listener.accept()[0]
            near, far = server.getpeername(), server.getsockname()
            assert server_module.user_of(near, far) == os.geteuid() and server_module.is_own_user(near, far)
        with server:
            assert server_module.user_of(near, far) is None
            assert not server_module.is_own_user(near, far), "nobody hears the answer, but a request may delete"


LOCAL_HOSTS = ["127.0.0.1:8001", "127.9.9.9", "localhost", "LOCALHOST:80", "app.localhost:8001", "[::1]:8001", "[::1]"]
FOREIGN_HOSTS = (
    *("evil.example", "evil.example:8001", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost"),
    *("192.168.1.2", "0.0.0.0", "[::2]:1", "evil.example#@localhost", "localhost@evil.example", "[", ""),
)


def test_without_keys_only_names_of_this_machine_are_answered_to(url: str, service: ScriptedService) -> None:
    """DNS rebinding: a page whose name now points to this machine sends same-origin requests, without an origin."""
    for host in LOCAL_HOSTS:
        assert request("GET", url + "/v1/models", headers={"host": host}).status_code == 200, host
    for host in FOREIGN_HOSTS:
        for method, path in (("GET", "/v1/models"), ("GET", "/x"), ("POST", CHAT)):
            response = request(method, url + path, headers={"host": host})
            assert fault(response, 403)["code"] == "host_not_allowed", host
            assert response.headers["x-request-id"]
        asked = {"host": host, "origin": "http://localhost:3000", "access-control-request-method": "POST"}
        assert request("OPTIONS", url + CHAT, headers=asked).status_code == 403
        assert request("GET", url + "/healthz", headers={"host": host}).status_code == 200, "open to all in any case"
    assert not service.requests


def test_a_request_without_any_host_is_not_answered_without_keys(url: str) -> None:
    assert not is_local_host(None)
    with connected(url) as client:
        client.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        answer = heard(client)
    assert answer.startswith(b"HTTP/1.1 403 ") and b"host_not_allowed" in answer


def test_with_keys_a_server_has_any_name(keyed: tuple[ScriptedService, str]) -> None:
    headers = {"host": "llm.example.org", "authorization": "Bearer sk-open"}
    assert request("GET", keyed[1] + "/v1/models", headers=headers).status_code == 200


PROXY_HEADERS = {
    **dict.fromkeys(("X-Forwarded-For", "X-Real-IP", "CF-Connecting-IP"), "203.0.113.7"),
    **dict.fromkeys(("x-forwarded-host", "X-Forwarded-Server"), "llm.example.org"),
    "X-Forwarded-Proto": "https",
    "Forwarded": "for=203.0.113.7",
    "VIA": "1.1 tunnel",
}


def test_without_keys_what_came_through_a_proxy_is_not_answered(
    url: str, service: ScriptedService, keyed: tuple[ScriptedService, str]
) -> None:
    for name, value in PROXY_HEADERS.items():
        headers = {"host": "127.0.0.1:8000", name: value}
        told = fault(request("POST", url + CHAT, headers=headers), 403)
        assert told["code"] == "proxy_not_allowed" and "make a key" in str(told["message"]), name
        assert request("GET", url + "/healthz", headers=headers).status_code == 200, "open to all in any case"
        known = headers | {"authorization": "Bearer sk-open"}
        assert request("GET", keyed[1] + "/v1/models", headers=known).status_code == 200, "with keys any proxy may be"
    assert not service.requests


def test_without_keys_what_a_page_of_another_site_has_its_browser_fetch_is_not_answered(
    url: str, service: ScriptedService, keyed: tuple[ScriptedService, str]
) -> None:
    cross = {"sec-fetch-site": "cross-site"}  # an image or a script: without an origin
    assert fault(request("GET", url + "/v1/models", headers=cross), 403)["code"] == "origin_not_allowed"
    assert request("GET", url + "/", headers=cross).status_code == 200, "a link to the page"
    for site in ("same-origin", "same-site", "none"):
        assert request("GET", url + "/v1/models", headers={"sec-fetch-site": site}).status_code == 200
    local = cross | {"origin": "http://localhost:3000"}  # of 127.0.0.1, as browsers see it
    assert request("GET", url + "/v1/models", headers=local).status_code == 200
    known = cross | {"authorization": "Bearer sk-open"}
    assert request("GET", keyed[1] + "/v1/models", headers=known).status_code == 200
    assert not service.requests


def test_origins_are_read_as_browsers_write_them() -> None:
    for origin in ("http://localhost", "https://127.0.0.1:8443", "http://[::1]:8", "tauri://localhost"):
        assert is_local_origin(origin), origin
    for origin in (
        *(f"https://evil.example{sign}@localhost" for sign in "\\/#?"),
        *("https://user@localhost", "http://localhost/", "http://localhost\n", " http://localhost", "http:localhost"),
        *("http:///localhost", "http://localhost:8000:9000", "http://local\thost", "javascript://localhost"),
        *("app://evil.example\\@x", "file://", "null", ""),
    ):
        assert not is_local_origin(origin), origin


def test_no_answer_is_guessed_kept_or_held_by_another_page(url: str, keyed: tuple[ScriptedService, str]) -> None:
    asked = [
        request("GET", url + "/v1/models"),
        request("GET", url + "/v1/none"),
        request("POST", url + CHAT, json=BODY),
        request("POST", url + CHAT, content=b"{"),
        request("GET", keyed[1] + "/v1/models"),
        request("GET", url + "/v1/models", headers={"host": "evil.example"}),
    ]
    for answer in asked:
        assert answer.headers["x-content-type-options"] == "nosniff", answer.url
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
    page = request("GET", url + "/")
    assert page.headers.get_list("x-content-type-options") == ["nosniff"]
    assert page.headers.get_list("cache-control") == ["no-cache"]


# ---- logging --------------------------------------------------------------------------------------------------------
def test_the_log_has_no_prompt_and_no_key(keyed: tuple[ScriptedService, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with client_of(keyed[1], "sk-open") as http:
        assert post(http, messages=[{"role": "user", "content": "CANARY-1"}]).status_code == 200
        fault(post(http, messages=[{"role": "CANARY-2", "content": "CANARY-3"}]))
        keyed[0].script = Script([ZeroDivisionError()])
        fault(post(http, messages=[{"role": "user", "content": "CANARY-4"}]), 500)
    keyed[0].script = ScriptedService().script
    assert "req_" in caplog.text
    assert "CANARY" not in caplog.text and "sk-open" not in caplog.text


def test_a_server_lives_and_is_not_ready_while_its_keys_cannot_be_read() -> None:
    stored = FreshKeys()
    with running(create_app(ScriptedService(), keyring=Keyring({}, stored))) as url, client_of(url) as http:
        stored.fault = StorageError("the database cannot be reached", away=True)
        assert http.get("/healthz").status_code == 200
        for path in ("/readyz", "/health"):
            unready = http.get(path)
            assert unready.status_code == 503 and unready.json()["ready"] is False
            assert unready.json()["keys"] == "its keys cannot be read; its log says why"
        refused = http.get("/v1/models")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        stored.fault = None
        assert http.get("/readyz").json()["ready"] is True
