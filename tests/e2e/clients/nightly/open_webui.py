"""Open WebUI: its server, started here without accounts, with this one behind it for models, chats and embeddings.

Its page is not opened: what it sends goes through the same routes of its server, which are asked here. Nothing but the
embedder of this server reads its files.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checks
import httpx

url, key = sys.argv[1:]
ASKED = {"model": checks.MODEL, "messages": [{"role": "user", "content": checks.QUESTION}]}


@contextmanager
def webui(folder: Path) -> Iterator[httpx.Client]:
    """A client, signed in, of a server that runs until the end."""
    environment = {
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of this test alone",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URLS": f"{url}/v1",
        "OPENAI_API_KEYS": key,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": f"text-embedding-{checks.EMBEDDER.lower()}",
        "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
        "RAG_OPENAI_API_KEY": key,
    }
    with checks.served(folder, "open-webui", "serve", health="/health", environment=environment) as client:
        token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
        client.headers["authorization"] = f"Bearer {token}"
        yield client


def done(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def models(client: httpx.Client) -> None:
    found = [each["id"] for each in done(client.get("/api/models"))["data"]]
    assert checks.MODEL in found and f"{checks.MODEL}:plain" in found, found


def chat(client: httpx.Client) -> None:
    body = done(client.post("/api/chat/completions", json={**ASKED, "stream": False}))
    checks.opens(body["choices"][0]["message"]["content"])


def streamed(client: httpx.Client) -> None:
    with client.stream("POST", "/api/chat/completions", json={**ASKED, "stream": True}) as answer:
        text = "".join(answer.iter_text())
    assert text.rstrip().endswith("data: [DONE]") and text.count("data: ") > 3, text[-500:]


def title(client: httpx.Client) -> None:
    answered = {"role": "assistant", "content": "It opens at 8:30."}
    asked = {"model": checks.MODEL, "messages": [*ASKED["messages"], answered]}
    assert done(client.post("/api/v1/tasks/title/completions", json=asked))["choices"], "a title, or at least no error"


def file(client: httpx.Client) -> None:
    """Its own retrieval over an uploaded file, with this server's embedder."""
    text = b"The ferry to Omber leaves at 6:45.\n"
    sent = client.post("/api/v1/files/?process_in_background=false", files={"file": ("ferry.txt", text, "text/plain")})
    name = f"file-{done(sent)['id']}"
    asked = {"collection_name": name, "query": "When does the ferry leave?", "k": 1}
    found = done(client.post("/api/v1/retrieval/query/doc", json=asked))
    assert "6:45" in found["documents"][0][0], found


with tempfile.TemporaryDirectory() as name, webui(Path(name)) as signed_in:
    checks.run(
        "open-webui",
        {check.__name__: lambda check=check: check(signed_in) for check in (models, chat, streamed, title, file)},
    )
