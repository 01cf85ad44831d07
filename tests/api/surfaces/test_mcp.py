"""Documents as tools of the Model Context Protocol: the protocol's own client, over HTTP and through `paceline mcp`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.api.real import serving_documents
from tests.api.scripted import client_of
from tests.api.vector_stores.test_files import BOAT, POLL
from tests.client.test_conversation import invoked

OWN = "The red boat of the harbour museum is old."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_documents(tmp_path_factory.mktemp("docs"), {"own.txt": OWN}, "ann", "bert", side="device") as url:
        yield url


def called(url: str, key: str, *calls: tuple[str, dict[str, Any]], mode: str = "auto") -> list[Any]:
    """The SDK's results of calls of tools."""

    async def calling() -> list[Any]:
        http = create_mcp_http_client(headers={"authorization": f"Bearer {key}"})
        async with http, Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {"search", "fetch"}
            return [await client.call_tool(name, asked) for name, asked in calls]

    return asyncio.run(calling())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_passage_is_found_and_read(url: str, mode: str) -> None:
    (found,) = called(url, "ann", ("search", {"query": "red boat"}), mode=mode)
    (one,) = found.structured_content["results"]
    assert (one["title"], one["text"], one["url"]) == ("own.txt", OWN, f"{url}/passage?id={one['id']}")
    assert json.loads(found.content[0].text) == found.structured_content, "for clients that read text alone"
    fetched, none = called(url, "ann", ("fetch", {"id": one["id"]}), ("fetch", {"id": "x"}), mode=mode)
    assert fetched.structured_content["text"] == OWN and fetched.structured_content["metadata"]["side"] == "device"
    assert none.is_error and "not here" in none.content[0].text


def test_a_key_finds_its_own_stores_and_no_other_keys(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="ann", max_retries=0) as ann:
        store = ann.vector_stores.create(name="boats")
        boat = ("boat.txt", BOAT.encode())
        ann.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=boat, poll_interval_ms=POLL)
    asked = ("search", {"query": "boat", "vector_stores": [store.id]})
    (own,) = called(url, "ann", asked)
    (passage,) = own.structured_content["results"]
    assert passage["text"] == BOAT
    refused, unread = called(url, "bert", asked, ("fetch", {"id": passage["id"]}))
    assert refused.is_error and "No such vector store" in refused.content[0].text
    assert unread.is_error and BOAT not in unread.content[0].text


def relayed(url: str, key: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """What `paceline mcp` answers on standard output."""
    lines = "".join(json.dumps(message) + "\n" for message in messages)
    said = invoked("mcp", "--url", url, "--key", key, input=lines)
    assert said.exit_code == 0, said.output
    return [json.loads(line) for line in said.stdout.splitlines()]


def test_messages_of_standard_input_are_answered_on_standard_output(url: str) -> None:
    version = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    search = {"name": "search", "arguments": {"query": "red"}}
    begun, found = relayed(
        url,
        "ann",
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": version},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": "b", "method": "tools/call", "params": search},
    )
    assert "private documents" in begun["result"]["instructions"]
    assert found["id"] == "b" and found["result"]["structuredContent"]["results"][0]["text"] == OWN
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/list"}
    (fault,) = relayed(url, "nobody's", {"jsonrpc": "2.0", "method": "notifications/initialized"}, call)
    assert fault["id"] == 3 and "wants a key" in fault["error"]["message"]
    (gone,) = relayed("http://127.0.0.1:9", "ann", call)
    assert "Nothing answers" in gone["error"]["message"]


def test_what_is_no_message_is_refused_by_name(url: str) -> None:
    with client_of(url, "ann") as http:
        assert http.post("/mcp", json={"method": "tools/list"}).json()["error"]["param"] == "jsonrpc"
        unknown = http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/drop"})
        assert unknown.json()["error"]["code"] == -32601
        assert http.get("/mcp").status_code == 405
        listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        headers = [(b"accept", b"application/json, text/event-stream"), (b"mcp-name", b"\xe9")]
        assert http.post("/mcp", json=listed, headers=headers).status_code == 200, "whatever bytes its headers have"
