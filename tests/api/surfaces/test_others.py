"""Rerank, tokenize, health and version, hints for what is absent, and names that clients give their requests."""

from __future__ import annotations

import httpx
import pytest

from paceline.api.http.errors import ABSENT
from paceline.api.texts import MAX_TOKENS
from tests.api.generation.test_request import fault
from tests.api.scripted import ScriptedService, client_of, serving

DOCUMENTS = ["cats sleep", "when does it open", "it does"]


def test_documents_come_in_the_order_of_their_relevance(http: httpx.Client) -> None:
    body = {"query": "when does it open", "documents": DOCUMENTS}
    ranked = http.post("/v1/rerank", json=body).json()
    assert [each["index"] for each in ranked["results"]] == [1, 2, 0]
    assert ranked["model"] == "scripted-reranker" and ranked["usage"]["total_tokens"] == 12
    assert all(set(each) == {"index", "relevance_score"} for each in ranked["results"])
    few = http.post("/v2/rerank", json=body | {"top_n": 2, "return_documents": True}).json()["results"]
    assert [each["document"]["text"] for each in few] == ["when does it open", "it does"]
    objects = body | {"documents": [{"text": text} for text in DOCUMENTS], "model": "scripted-reranker"}
    assert http.post("/v1/rerank", json=objects).json()["results"] == ranked["results"]


def test_what_cannot_be_ranked_is_refused_by_name(http: httpx.Client) -> None:
    cases: list[dict[str, object]] = [{"query": ""}, {"documents": []}, {"documents": ["a"] * 1001}, {"top_n": 0}]
    for fields in ({"model": "nobody"}, *cases):
        refused = http.post("/v1/rerank", json={"query": "a", "documents": ["b"]} | fields)
        assert fault(refused, 404 if "model" in fields else 400)["param"] in fields


def test_a_side_without_a_reranker_says_what_to_do(node_url: str) -> None:
    refused = httpx.post(f"{node_url}/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert "[tuning]" in str(fault(refused, 404)["message"])


def test_tokens_are_those_that_the_model_is_sent(node_url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with client_of(node_url) as http:
        told = http.post("/tokenize", json={"model": "fake", "prompt": "hé", "return_token_strs": True}).json()
        assert told == {"count": 3, "max_model_len": 1024, "tokens": [104, 195, 169], "token_strs": ["h", "�", "�"]}
        assert http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "hé"}
        counted = http.post("/tokenize", json={"messages": messages}).json()["count"]
        answer = http.post("/v1/chat/completions", json={"model": "fake", "messages": messages, "max_tokens": 1})
        assert counted == answer.json()["usage"]["prompt_tokens"]
        anthropic = {"model": "fake", "messages": messages}
        assert http.post("/v1/messages/count_tokens", json=anthropic).json() == {"input_tokens": counted}


def test_no_more_tokens_are_told_than_are_read_back(node_url: str) -> None:
    """A body of 1 MiB may have a million, whose answer takes seconds to write."""
    with client_of(node_url) as http:
        most = http.post("/tokenize", json={"prompt": "a" * MAX_TOKENS, "return_token_strs": True}).json()
        assert most["count"] == len(most["token_strs"]) == MAX_TOKENS
        assert http.post("/detokenize", json={"tokens": most["tokens"]}).json() == {"prompt": "a" * MAX_TOKENS}
        refused = fault(http.post("/tokenize", json={"prompt": "a" * (MAX_TOKENS + 1)}))
    assert refused["param"] == "prompt" and str(MAX_TOKENS + 1) in str(refused["message"])


def test_what_cannot_be_tokenized_is_refused_by_name(http: httpx.Client) -> None:
    cases: list[tuple[str, dict[str, object], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * (MAX_TOKENS + 1)}]}, "messages"),
        ("/detokenize", {"tokens": [1, 256]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ]
    for path, fields, param in cases:
        assert fault(http.post(path, json=fields))["param"] == param


def test_what_is_absent_is_refused_with_what_to_use_and_behind_the_key(service: ScriptedService) -> None:
    with serving(service, {"key": None}) as url, client_of(url) as http, client_of(url, "key") as known:
        for path in (path for path in ABSENT if not path.startswith(("/api", "/v1/messages"))):
            fault(http.post(path, json={}), 401)
            for method, each in (("POST", path), ("GET", path), ("POST", path + "/x/y")):
                if method == "GET" and path.startswith("/v1/responses"):
                    continue  # of a response with that id
                error = fault(known.request(method, each), 404)
                assert error["code"] == "unknown_url" and ABSENT[path] in str(error["message"])


def test_a_base_url_without_its_version_is_recognised(http: httpx.Client) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/messages", "/v1/rerank/", "/mcp/"):
        meant = path.rstrip("/") if path.endswith("/") else f"/v1{path.removeprefix('/v1/v1')}"
        assert f"Did you mean {meant}?" in str(fault(http.post(path, json={}), 404)["message"])


@pytest.mark.parametrize(("given", "echoed"), [("abc-1 x", True), ("x" * 512, True), ("x" * 513, False), ("é", False)])
def test_a_clients_own_name_of_a_request_is_echoed(http: httpx.Client, given: str, echoed: bool) -> None:
    for path in ("/v1/models", "/nothing"):
        answer = http.get(path, headers={"x-client-request-id": given.encode("latin-1")})  # type: ignore[dict-item]  # bytes are sent as they are
        assert answer.headers.get("x-client-request-id") == (given if echoed else None)
