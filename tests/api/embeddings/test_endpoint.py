"""`/v1/embeddings` with the official client on a real node with hashed vectors."""

from __future__ import annotations

import base64
import gzip
import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from paceline.api.texts import MAX_INPUTS, text_of, vocabulary
from paceline.errors import RequestError
from paceline.rag.embedder import HashEmbedder
from paceline.runtime.node import MAX_TOKENS
from tests.api.generation.test_request import fault

ROUTE = "/v1/embeddings"
TEXTS = ["The tide is low.", "Ein Fahrrad 🚲 am Ufer", "tide"]


def test_the_clients_default_gives_the_embedders_vectors_in_order(client: openai.OpenAI) -> None:
    """The official client requests base64 by default, and decodes it."""
    expected = HashEmbedder().embed(TEXTS)
    answer = client.embeddings.create(model="hash", input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert np.array_equal(np.array([item.embedding for item in answer.data], dtype=np.float32), expected)
    one = client.embeddings.create(model="hash", input=TEXTS[1], dimensions=256)
    assert one.data[0].embedding == answer.data[1].embedding
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(HashEmbedder().count, TEXTS))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", "hash", "embedding")


def test_floats_are_the_default_and_base64_is_little_endian_float32(http: httpx.Client) -> None:
    body = {"model": "hash", "input": TEXTS[0]}
    floats = http.post(ROUTE, json=body).json()["data"][0]["embedding"]
    assert http.post(ROUTE, json=body | {"encoding_format": "float"}).json()["data"][0]["embedding"] == floats
    encoded = http.post(ROUTE, json=body | {"encoding_format": "base64"}).json()
    assert list(struct.unpack("<256f", base64.b64decode(encoded["data"][0]["embedding"]))) == floats
    assert set(encoded["usage"]) == {"prompt_tokens", "total_tokens"}


def test_invalid_inputs_are_refused_by_name(http: httpx.Client) -> None:
    cases: list[tuple[dict[str, object], str, str]] = [
        ({"input": None}, "input", "required"),
        ({"input": ""}, "input", "empty string"),
        ({"input": ["a", ""]}, "input[1]", "empty string"),
        ({"input": []}, "input", "empty list"),
        ({"input": [[]]}, "input[0]", "empty list"),
        ({"input": ["a", 1]}, "input[1]", "a string"),
        ({"input": [[1], "a"]}, "input[1]", "token ids"),
        ({"input": [1.5]}, "input[0]", "must be"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS}"),
        ({"input": "word " * (MAX_TOKENS + 1)}, "input", "maximum context length is 8192 tokens"),
        ({"encoding_format": "binary"}, "encoding_format", "base64"),
        ({"dimensions": 0}, "dimensions", "greater than"),
        ({"dimensions": 64}, "dimensions", "256 dimensions"),
        ({"model": None}, "model", "required"),
    ]
    for more, param, words in cases:
        refused = fault(http.post(ROUTE, json={"model": "hash", "input": "a"} | more), 400)
        assert refused["param"] == param and words in str(refused["message"]), param


def test_a_chat_model_and_an_unknown_one_make_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"makes no embeddings\. Known embedders: hash"):
        client.embeddings.create(model="fake", input="a")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"


def test_a_body_may_be_larger_than_a_chats_but_not_without_bound(http: httpx.Client) -> None:
    texts = ["word " * 200] * 1500
    assert http.post(ROUTE, json={"model": "hash", "input": texts}).status_code == 200
    refused = fault(http.post(ROUTE, content=b" " * (8 << 20) + b"{}"), 413)
    assert refused["code"] == "request_too_large"


def test_the_embedder_is_in_the_list_of_models(client: openai.OpenAI) -> None:
    """Last, by its own name and by one that front ends leave out of their menus of chat models."""
    kinds = {model.id: (model.model_extra or {})["paceline"]["kind"] for model in client.models.list()}
    chats = ("fake", "fake:plain", "fake:local-only", "fake:fast", "fake:advanced", "fake:long")
    assert kinds == dict.fromkeys(chats, "chat") | dict.fromkeys(("text-embedding-hash", "hash"), "embedding")
    vectors = [client.embeddings.create(model=name, input="a").data[0] for name in ("hash", "text-embedding-hash")]
    assert vectors[0].embedding == vectors[1].embedding
    assert (client.models.retrieve("hash").model_extra or {})["meta"] == {"n_embd": 256}


# ---- token ids ------------------------------------------------------------------------------------------------------
def packed(directory: Path, tokens: dict[int, bytes]) -> Mapping[int, bytes]:
    lines = b"".join(base64.b64encode(token) + b" %d\n" % number for number, token in tokens.items())
    file = directory / "small.tiktoken.gz"
    file.write_bytes(gzip.compress(lines))
    return vocabulary(file, hashlib.sha256(lines).hexdigest())


def test_token_ids_are_read_with_openais_vocabulary(tmp_path: Path) -> None:
    tokens = packed(tmp_path, {0: b"The", 1: b" t", 2: b"ide", 3: "🚲".encode()[:2], 4: "🚲".encode()[2:]})
    assert text_of([0, 1, 2, 3, 4], tokens, "input") == "The tide🚲"
    with pytest.raises(RequestError, match="holds 5, which is no token of cl100k_base"):
        text_of([0, 5], tokens, "input")


def test_without_the_vocabulary_the_error_names_the_remedy(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for value in ([791, 9522], [[791], [9522]]):
        refused = fault(http.post(ROUTE, json={"model": "hash", "input": value}), 400)
        assert "check_embedding_ctx_length=False" in str(refused["message"])
