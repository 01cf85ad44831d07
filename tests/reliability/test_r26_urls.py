"""R26: URLs in requests and in uploaded files are never fetched. A control shows that a fetch would be counted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tests.reliability.conftest import Figure, Size
from tests.reliability.listening import Heard

HOSTS = (
    "127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0",
    "user:password@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1.nip.io", "169.254.169.254",
    "metadata.google.internal", "[fd00:ec2::254]", "192.0.2.1",
)  # fmt: skip
SCHEMES = ("http", "https", "ws", "ftp", "gopher", "HTTP")
PATHS = ("/", "/latest/meta-data/", "/redirect?to=http://127.0.0.1/", "/a.png", "/schema.json#/$defs/a")
FILES = {
    "page.html": '<html><base href="{u}"><link rel=stylesheet href="{u}"><script src="{u}"></script><body>'
    '<img src="{u}"><iframe src="{u}"></iframe><p>The mill is red.</p></body></html>',
    "note.md": "# Mill\n\n![mill]({u}) [link]({u}) <{u}>\n\n<img src='{u}'>\n\nThe mill is red.\n",
    "entity.xml": '<!DOCTYPE a [<!ENTITY % e SYSTEM "{u}"> %e; <!ENTITY x SYSTEM "{u}">]><a>&x; The mill is red.</a>',
    "data.json": '{{"$ref": "{u}", "text": "The mill is red."}}',
    "rows.csv": 'mill,"=WEBSERVICE(""{u}"")"\nred,{u}\n',
    "plain.txt": "{u}\n\nThe mill is red.\n",
}


def targets(rng: random.Random, port: int, count: int) -> list[str]:
    """Each host at least once, with schemes, paths and the listener's port or the usual one."""
    urls = []
    for number in range(count):
        host = HOSTS[number % len(HOSTS)]
        where = rng.choice((f":{port}", f":{port}", ""))
        urls.append(f"{rng.choice(SCHEMES)}://{host}{where}{rng.choice(PATHS)}")
    return urls


def requests(url: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Path and body of requests that hold the URL in every place that might be fetched."""
    text: dict[str, object] = {"type": "text", "text": f"Read {url} for me."}
    chat = {"model": "fake", "max_tokens": 2, "metadata": {"source": url}, "user": url}
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_data": url, "filename": "a.pdf"}},
        text,
    ):
        yield "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": [text, part]}]}
    schema = {"$schema": url, "$id": url, "type": "object", "properties": {"a": {"$ref": url}}}
    asked: dict[str, object] = {**chat, "messages": [{"role": "user", "content": url}]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    yield "/v1/chat/completions", asked | {"response_format": form}
    function = {"name": "fetch", "description": url, "parameters": schema}
    yield "/v1/chat/completions", asked | {"tools": [{"type": "function", "function": function}]}
    yield "/v1/chat/completions", asked | {"web_search_options": {}, "paceline": {"vector_stores": [url]}}
    response: dict[str, object] = {"model": "fake", "max_output_tokens": 2, "input": url}
    for item in ({"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_file", "file_url": url}):
        yield "/v1/responses", response | {"input": [{"role": "user", "content": [item]}]}
    for tool in (
        {"type": "mcp", "server_label": "a", "server_url": url, "require_approval": "never"},
        {"type": "web_search", "filters": {"allowed_domains": [url]}},
        {"type": "file_search", "vector_store_ids": [url]},
    ):
        yield "/v1/responses", response | {"tools": [tool]}
    yield "/v1/responses", response | {"prompt": {"id": url}, "conversation": url, "previous_response_id": url}
    yield "/v1/responses", response | {"metadata": {"webhook": url}, "background": False}
    yield "/v1/embeddings", {"model": "fake", "input": url}
    yield "/v1/completions", {"model": "fake", "prompt": url, "max_tokens": 2}
    yield "/v1/vector_stores", {"name": url, "file_ids": [url], "metadata": {"a": url}}


def test_no_url_in_a_request_or_a_file_is_fetched(heard: Heard, rng: random.Random, size: Size, figure: Figure) -> None:
    http, listener = heard.http, heard.listener
    assert listener.counts(), "the control: a program that fetches is counted"
    urls = targets(rng, listener.port, size(16, 100))
    sent = accepted = 0
    for url in urls:
        forged = {"host": url[:200], "referer": url, "origin": url, "x-forwarded-host": url, "forwarded": f"host={url}"}
        for path, body in requests(url):
            answer = http.post(path, json=body)
            assert answer.status_code < 500, (path, body, answer.text)
            sent, accepted = sent + 1, accepted + (answer.status_code == 200)
        del forged["host"]
        assert http.get("/v1/models", headers=forged).status_code < 500
    for url in urls[: size(3, 100)]:
        made = [
            http.post("/v1/files", files={"file": (name, text.format(u=url))}, data={"purpose": "assistants"})
            for name, text in FILES.items()
        ]
        ids = [json.loads(each.text)["id"] for each in made if each.status_code == 200]
        assert len(ids) >= 4
        store = http.post("/v1/vector_stores", json={"name": "notes", "file_ids": ids}).json()["id"]
        while http.get(f"/v1/vector_stores/{store}").json()["file_counts"]["in_progress"]:
            pass  # each look is a request
        found = http.post(f"/v1/vector_stores/{store}/search", json={"query": f"mill {url}"})
        assert found.status_code == 200
        sent += len(made)
    assert listener.connects == 0
    assert accepted, "some are answered: the URL is text to the model"
    figure("targets", len(urls))
    figure("requests with a URL", sent)
    figure("connections made", listener.connects, at_most=0)
