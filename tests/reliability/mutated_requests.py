"""HTTP requests with a key, seeded: valid bodies with parts replaced, odd JSON, ids, cursors, headers and forms."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any

MAX_TOKENS = 4  # of an answer, where a body says nothing odd

MESSAGES = [{"role": "user", "content": "Who keeps the key?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "max_tokens": MAX_TOKENS}),
    ("/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "stream": True, "n": 2}),
    ("/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "response_format": FORMAT}),
    ("/v1/chat/completions", {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "tools": [TOOL]}),
    (
        "/v1/chat/completions",
        {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "paceline": {"strategy": "aggregate", "documents": 2}},
    ),
    ("/v1/responses", {"model": "fake", "input": "Hi", "max_output_tokens": 16}),
    ("/v1/responses", {"model": "fake", "input": MESSAGES, "max_output_tokens": 16, "stream": True, "store": True}),
    ("/v1/responses", {"model": "fake", "input": "Hi", "max_output_tokens": 16, "background": True}),
    ("/v1/completions", {"model": "fake", "prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "stop": ["x"]}),
    ("/v1/embeddings", {"model": "hash", "input": ["a", "b"], "encoding_format": "base64"}),
    ("/v1/vector_stores", {"name": "s", "metadata": {"a": "b"}}),
    ("/v1/vector_stores/vs_x/search", {"query": "a", "max_num_results": 3}),
    ("/v1/vector_stores/vs_x/files", {"file_id": "file-x", "attributes": {"a": 1}}),
)
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, -0.0, 0.5, "", "\0", "x", "x" * 5000, "\ud7ff\U0010ffff",
    "../../etc/passwd", "\u202e\x1b[2J", [], [[]], [None], ["x"] * 2000, {}, {"": {}}, {"type": "text"},
    {"role": "user"}, {"$ref": "#"}, [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
    {"type": "string", "pattern": "^(a|a)*$"}, {"enum": list(range(2000))},
)  # fmt: skip
IDS = (
    "x", "resp_x", "file-x", "vs_x", "..", "%2e%2e%2f", "%00", "a" * 3000, "resp_" + "0" * 32, "%ff",
    "file-" + "0" * 32,
)  # fmt: skip
GETS = (
    "/v1/models", "/v1/models/{}", "/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/files", "/v1/files/{}",
    "/v1/files/{}/content", "/v1/vector_stores", "/v1/vector_stores/{}", "/v1/vector_stores/{}/files",
    "/v1/vector_stores/{}/files/{}", "/v1/vector_stores/{}/file_batches/{}", "/metrics", "/readyz", "/healthz", "/{}",
)  # fmt: skip
QUERIES = ("limit", "after", "before", "order", "starting_after", "stream", "include[]", "purpose", "filter", "x")


@dataclass(slots=True)
class Request:
    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class RequestMutator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def request(self) -> Request:
        match self._rng.randrange(10):
            case 0:
                return self._get()
            case 1:
                return self._form()
            case 2:
                return self._odd_json()
            case _:
                path, body = self._rng.choice(BODIES)
                return self._json(path, self._mutated(body))

    def _json(self, path: str, body: Any) -> Request:
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if self._rng.random() < 0.1:
            content = self._damaged(content)
        if self._rng.random() < 0.1:
            odd = {"content-type": "text/html", "accept": "\x7f", "x-forwarded-for": "::1," * 50, "origin": "null"}
            headers |= dict(self._rng.sample(sorted(odd.items()), 2))
        return Request("POST", path.replace("_x", f"_{self._rng.randrange(9)}"), content, headers)

    def _mutated(self, body: dict[str, Any]) -> dict[str, Any]:
        """Some values anywhere in the body replaced, removed, repeated or put in."""
        changed = copy.deepcopy(body)
        for _ in range(self._rng.randint(0, 3)):
            place: Any = changed
            while True:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                if not keys:
                    break
                key = self._rng.choice(keys)
                inner = place[key]
                if isinstance(inner, dict | list) and inner and self._rng.random() < 0.6:
                    place = inner
                    continue
                match self._rng.randrange(4):
                    case 0 if isinstance(place, dict):
                        del place[key]
                    case 1 if isinstance(place, dict):
                        place[self._rng.choice(("stop", "seed", "top_p", "logit_bias", "x\0"))] = self._odd()
                    case 2 if isinstance(place, list):
                        place += [copy.deepcopy(inner)] * self._rng.choice((1, 30))
                    case _:
                        place[key] = self._odd()
                break
        for name in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if isinstance(changed.get(name), int) and changed[name] > 64:
                changed[name] = 64  # a long answer is no fault
        return changed

    def _odd(self) -> Any:
        return copy.deepcopy(self._rng.choice(ODD))

    def _odd_json(self) -> Request:
        depth = self._rng.choice((50, 500, 5000))
        content = self._rng.choice(
            (
                b'{"model":' * depth + b"1" + b"}" * depth,
                b"[" * depth + b"]" * depth,
                b'{"model": "fake", "messages": [{"role": "user", "content": "\\ud800"}]}',
                b'{"model": NaN}',
                b'{"model": ' + b"9" * 5000 + b"}",
                b'{"model": "fake", "model": 1}',
                b"\xff\xfe{}",
                b"null",
                b"",
                b'{"model": "fake"' + b" " * 20_000 + b"}",
            )
        )
        return Request("POST", self._rng.choice(BODIES)[0], content, {"content-type": "application/json"})

    def _get(self) -> Request:
        path = self._rng.choice(GETS)
        while "{}" in path:
            path = path.replace("{}", self._rng.choice(IDS), 1)
        query = "&".join(
            f"{self._rng.choice(QUERIES)}={self._rng.choice(('1', '-1', '0', 'x', '%00', '9' * 40, 'asc', 'true', ''))}"
            for _ in range(self._rng.randrange(4))
        )
        method = self._rng.choice(("GET", "GET", "GET", "DELETE", "POST", "PUT", "HEAD"))
        return Request(method, f"{path}?{query}" if query else path)

    def _form(self) -> Request:
        name = self._rng.choice(("a.md", "../../x", "", "a\\b", "x" * 500, "\xe9", "nul", "a.pdf", "a.docx"))
        purpose = self._rng.choice(("assistants", "x", "", "\0"))
        body = (
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode() + b"\r\n"
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="' + name.encode() + b'"\r\n\r\n'
            + self._rng.randbytes(self._rng.choice((0, 10, 3000))) + b"\r\n--b--\r\n"
        )  # fmt: skip
        if self._rng.random() < 0.5:
            body = self._damaged(body)
        return Request("POST", "/v1/files", body, {"content-type": "multipart/form-data; boundary=b"})

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.randint(1, 3)):
            place = self._rng.randrange(len(changed) + 1)
            match self._rng.randrange(3):
                case 0 if place < len(changed):
                    changed[place] ^= 1 << self._rng.randrange(8)
                case 1:
                    del changed[place : place + self._rng.randrange(9)]
                case _:
                    changed[place:place] = self._rng.randbytes(3)
        return bytes(changed)
