"""R27: documents that are bombs, given to a running server: each fails with a sentence and harms nobody beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from tests.e2e.pair import Server
from tests.rag.parsing.test_bombs import BOMBS
from tests.reliability.conftest import Figure

QUICK = (  # those that need no limit on time to end
    "zip of zeros", "zip of many members", "zip that understates", "XML entities in DOCX", "XML entities in EPUB",
    "an entity that is a file", "pages that contain themselves",
)  # fmt: skip
MIB = 1 << 20


def test_bombs_fail_with_a_sentence_beside_honest_requests(
    server: Server, figure: Figure, size: Callable[[int, int], int]
) -> None:
    process = psutil.Process(server.child.process.pid)
    kinds = list(BOMBS)[: size(0, len(BOMBS))] or list(QUICK)
    kinds = [kind for kind in kinds if kind != "too large a file"]  # refused before it is stored
    chat = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "an honest question"}]}
    assert server.call("POST", "/v1/chat/completions", json=chat).status_code == 200
    before = process.memory_info().rss
    ids = {}
    for kind in kinds:
        name, make, _ = BOMBS[kind]
        upload = {"file": (name, make())}
        answer = server.call("POST", "/v1/files", files=upload, data={"purpose": "assistants"})
        assert answer.status_code == 200, (kind, answer.text)
        ids[answer.json()["id"]] = kind
    good = server.call("POST", "/v1/files", files={"file": ("a.md", b"# Good")}, data={"purpose": "assistants"}).json()
    store = server.call("POST", "/v1/vector_stores", json={"file_ids": [*ids, good["id"]]}).json()["id"]
    waits = []
    while server.call("GET", f"/v1/vector_stores/{store}").json()["file_counts"]["in_progress"]:
        began = time.monotonic()
        assert server.call("POST", "/v1/chat/completions", json=chat).status_code == 200
        waits.append(time.monotonic() - began)
    listed = server.call("GET", f"/v1/vector_stores/{store}/files", params={"limit": 100}).json()["data"]
    assert len(listed) == len(ids) + 1
    for each in listed:
        if each["id"] == good["id"]:
            assert each["status"] == "completed"
            continue
        words = BOMBS[ids[each["id"]]][2]
        if words:
            assert each["status"] == "failed", (ids[each["id"]], each)
        if each["status"] == "failed":
            assert each["last_error"]["code"] in {"invalid_file", "unsupported_file"}, (ids[each["id"]], each)
            assert each["last_error"]["message"].endswith(".")
    figure("bombs", len(ids))
    figure("slowest honest answer beside them", max(waits, default=0.0), unit="s")
    figure("growth of the server", (process.memory_info().rss - before) / MIB, unit="MiB")
    assert server.call("GET", "/healthz").status_code == 200
