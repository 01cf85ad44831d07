"""R27: documents that are bombs, given to a running server, and damaged ones, given to the process that reads uploads:
each is read or fails with a sentence, and harms nobody beside it."""

from __future__ import annotations

import random
import time
from collections import Counter

import psutil

from paceline.errors import DocumentError
from paceline.rag.parsing.process import ParserProcess
from tests.e2e.pair import Server
from tests.rag.parsing import made
from tests.rag.parsing.test_bombs import BOMBS
from tests.reliability.conftest import Figure, Size

QUICK = (  # those that need no limit on time to end
    "zip of zeros", "zip of many members", "zip that understates", "XML entities in DOCX", "XML entities in EPUB",
    "an entity that is a file", "pages that contain themselves",
)  # fmt: skip
MIB = 1 << 20
TEXTS = {
    "a.md": b"# Harbour\n\nBoats *moor* on the [north](x) side.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n" * 5,
    "a.txt": "Ünïcödé and plain text.\n".encode() * 20,
    "a.html": b"<html><head><title>t</title></head><body><h1>a</h1><p>b<table><tr><td>c</table></body></html>" * 3,
    "a.csv": b'name,berth\n"Ann, B",7\nBert,"8\n9"\n' * 9,
    "a.json": b'{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
    "a.py": b"def f(x):\n    return x + 1\n" * 9,
}
CHAPTERS = {name: b"<html><body><h1>a</h1><p>Boats moor.</p></body></html>" for name in ("one", "two")}


def test_bombs_fail_with_a_sentence_beside_honest_requests(server: Server, figure: Figure, size: Size) -> None:
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


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut out, repeated and put in; sometimes none."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 3, 10, 60))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 | 1 if place < len(changed):
                changed[place] = rng.randrange(256)
            case 2:
                del changed[place : place + rng.randrange(60)]
            case 3:
                changed[place:place] = changed[place : place + rng.randrange(300)] * rng.choice((1, 2, 50))
            case _:
                changed[place:place] = (
                    rng.choice((b"<", b"[", b"(", b"\0", b"\xff", b'"', b"&a;", b"#", b"|", b"`")) * 30
                )
    return bytes(changed[:1_000_000])


def test_damaged_documents_are_read_or_refused(rng: random.Random, figure: Figure, size: Size) -> None:
    """Also under the names of others."""
    pdf = made.pdf([made.shown("Boats moor here.")] * 2, "Harbour", compressed=True)
    samples = {**TEXTS, "a.pdf": pdf, "a.docx": made.word_document(), "a.epub": made.book(CHAPTERS, ["one", "two"])}
    names, came = sorted(samples), Counter[str]()
    with ParserProcess() as parser:
        for _ in range(size(60, 20_000)):
            name = rng.choice(names)
            try:
                parser.parse_bytes(rng.choice((name, rng.choice(names))), damaged(rng, samples[name]))
                came["read"] += 1
            except DocumentError as refusal:
                came["refused"] += 1
                came["ended their reader"] += "(signal" in str(refusal)
    assert came["read"] and came["refused"]
    figure("damaged documents that were read", came["read"])
    figure("refused", came["refused"])
    figure("that ended their reader", came["ended their reader"])
