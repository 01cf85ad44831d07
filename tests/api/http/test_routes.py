"""HTTP around the routes: bodies, methods, keys, origins, health."""

from __future__ import annotations

import asyncio
import errno
import gc
import gzip
import json
import os
import signal
import socket
from contextlib import closing

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.api.app import create_app
from paceline.api.http import admission as admission_module
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Keyring
from paceline.api.http.errors import RefusedError
from paceline.api.http.server import listen, serve
from paceline.errors import ConfigError
from paceline.runtime.service import TextDelta
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import Script, ScriptedService, Signal, client_of, connected, done, heard, serving

CHAT = "/v1/chat/completions"


def test_a_byte_order_mark_before_a_body_is_no_part_of_it(http: httpx.Client) -> None:
    assert http.post(CHAT, content=b"\xef\xbb\xbf" + json.dumps(BODY).encode()).status_code == 200


def test_a_whole_surrogate_pair_is_a_character(http: httpx.Client, service: ScriptedService) -> None:
    body = json.dumps(BODY | {"messages": [{"role": "user", "content": "🚲"}]})
    assert "\\ud83d" in body
    assert http.post(CHAT, content=body).status_code == 200
    assert service.requests[0].prompt.messages[0]["content"] == "🚲"


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/v1/models", "localhost", 200),
        ("HTTP://127.0.0.1:80/v1/models?limit=2", "proxy.example", 200),  # the target's host counts
        ("https://localhost/v1/models/no%2Fmodel", "localhost", 404),
        ("http://localhost", "localhost", 200),  # the page
        ("http://evil.example/v1/models", "localhost", 403),
        ("http://ann@localhost/v1/models", "localhost", 403),
        ("http:///v1/models", "localhost", 403),
    ],
)
def test_a_target_in_absolute_form_is_as_good_as_its_path(url: str, target: str, host: str, status: int) -> None:
    with connected(url) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert heard(raw).startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("target", ["%2Fv1/models", "%2fhealthz", "*"])
def test_a_target_whose_slash_is_escaped_is_no_path(url: str, target: str) -> None:
    """Put behind the address of another server it would be a part of that."""
    with connected(url) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert heard(raw).startswith(b"HTTP/1.1 400")


def test_a_body_that_is_not_announced_is_served_up_to_the_limit(http: httpx.Client, service: ScriptedService) -> None:
    """A body that is announced: test_limits."""
    parts = [b'{"padding": "', *[b"x" * 65_536] * 17, b'"}']
    assert fault(http.post(CHAT, content=iter(parts)), 413)["code"] == "request_too_large"
    assert not service.requests
    assert http.post(CHAT, content=iter([json.dumps(BODY).encode()])).status_code == 200  # on whatever connection


def test_an_unknown_path_and_a_wrong_method_are_an_envelope(http: httpx.Client) -> None:
    for path in ("/pages", "/v1/", "/v1/chat", "/page/app", "/docs/", "/redoc", "/v1/models/nobody/here"):
        fault(http.get(path), 404)
    response = http.get(CHAT)
    fault(response, 405)
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == f"{CHAT} does not take GET. It takes POST."
    fault(http.delete("/v1/models"), 405)
    fault(http.options(CHAT), 405)


def test_models_are_listed_with_their_context(http: httpx.Client) -> None:
    body = http.get("/v1/models").json()
    names = ["scripted", "org/second", "scripted-embedder"]
    models = [model for model in body["data"] if ":" not in model["id"]]  # the others are switches of the first
    assert body["object"] == "list" and [model["id"] for model in models] == names
    first = models[0]
    assert first["object"] == "model" and first["owned_by"] == "paceline" and isinstance(first["created"], int)
    assert first["max_model_len"] == first["meta"]["n_ctx"] == 4096
    assert http.get("/v1/models/scripted").json() == first and first["paceline"]["exact"] is True
    assert [model["paceline"]["kind"] for model in models] == ["chat", "chat", "embedding"]
    embedder = http.get("/v1/models/scripted-embedder").json()
    assert (embedder["max_model_len"], embedder["meta"]) == (256, {"n_embd": 4})
    assert http.get("/v1/models/org/second").json()["id"] == "org/second"
    assert fault(http.get("/v1/models/gpt-4o"), 404)["code"] == "model_not_found"
    refused = fault(http.post(CHAT, json=BODY | {"model": "scripted-embedder"}), 404)
    assert refused["code"] == "model_not_found" and "/v1/embeddings" in str(refused["message"])


def test_health_and_readiness(http: httpx.Client, service: ScriptedService) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"ready": True, "side": "cloud", "model": "scripted", "documents": 0}
    service.is_ready = False
    for path in ("/readyz", "/health"):
        response = http.get(path)
        assert response.status_code == 503 and response.json()["ready"] is False
    assert http.get("/version").json().keys() == {"version"}


def test_metrics_are_prometheus_samples(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    samples = {sample.name: (family.type, sample.value) for family in families for sample in family.samples}
    counters = {"steps": 3, "rows": 50, "cached_rows": 7, "preemptions": 4}
    gauges = {"answers": 2, "kv_rows": 160, "kv_free_rows": 96, "waiting_answers": 0, "links": 0}
    expected = {f"paceline_engine_{name}_total": ("counter", value) for name, value in counters.items()}
    expected |= {f"paceline_{name}": ("gauge", value) for name, value in gauges.items()}
    assert samples.items() >= expected.items()


# ---- load and the end -----------------------------------------------------------------------------------------------
def test_too_many_requests_at_once_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MAX_ACTIVE", 1)
    service, go_on = ScriptedService(), Signal()
    service.script = Script([TextDelta("a", 1), go_on, done()])
    with (
        serving(service) as url,
        client_of(url) as http,
        http.stream("POST", CHAT, json=BODY | {"stream": True}) as first,
    ):
        response = post(http)
        assert fault(response, 429)["code"] == "too_many_requests"
        assert response.headers["retry-after"] == "1"
        assert http.get("/v1/models").status_code == 200
        go_on.set()
        assert first.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "encoding"), [(CHAT, "gzip"), ("/v1/messages", "br"), ("/v1/files", "deflate, gzip")])
def test_a_compressed_body_is_refused_by_name(http: httpx.Client, encoding: str, path: str) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    response = http.post(path, content=body, headers={"content-encoding": encoding})
    assert response.status_code == 415 and response.headers["accept-encoding"] == "identity"
    assert f"Content-Encoding '{encoding}'" in str(response.json()["error"])


@pytest.mark.anyio
async def test_draining_refuses_new_requests_and_waits_for_active_ones() -> None:
    admission = AdmissionControl(Keyring({}))
    admission.enter()
    drained = asyncio.create_task(admission.drain())
    await asyncio.sleep(0)
    with pytest.raises(RefusedError) as refused:
        admission.enter()
    assert refused.value.failure.status == 503 and "Retry-After" in refused.value.failure.headers
    assert not drained.done()
    admission.leave()
    await drained


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_heap_is_frozen_while_serving_until_a_signal(number: signal.Signals) -> None:
    spared: list[int] = []

    def ready() -> None:
        spared.append(gc.get_freeze_count())
        os.kill(os.getpid(), number)

    asyncio.run(serve(create_app(ScriptedService(), keyring=Keyring({})), listen("127.0.0.1", 0), on_ready=ready))
    assert spared[0] > 0
    assert gc.get_freeze_count() == 0


# ---- where it listens ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EADDRINUSE, "Stop what uses it"),
        (errno.EACCES, "below 1024"),
        (errno.EADDRNOTAVAIL, "no such address"),
    ],
)
def test_the_advice_on_an_address_that_cannot_be_used_fits_its_fault(
    monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(ConfigError, match=advice):
        listen("127.0.0.1", 0)


def test_of_a_names_addresses_the_first_that_this_machine_has_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in ("192.0.2.1", "127.0.0.1", "127.0.0.2")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with closing(listen("localhost", 0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
