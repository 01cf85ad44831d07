"""`/v1/files` and `/v1/vector_stores` with OpenAI's own client against a real server, and refused requests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import openai
import pytest

from paceline.postgres import Postgres
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store import files as files_module
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.sql import Home
from paceline.strategies.base import Side
from tests.api.scripted import ScriptedService, client_of, connected, serving

BOAT = "The red boat belongs to Ann Bell."
TRAIN = "The night train to Lisbon leaves at nine."
POLL = 20  # ms
KEYS = {"ann": None}


def opened(folder: Path, side: Side = "cloud", home: Home | None = None) -> Iterator[ScriptedService]:
    with DocumentStore.open(folder, HashEmbedder(), home=home) as documents:
        service = ScriptedService(side)
        service.library = Library(documents, side)
        service.library.start()
        try:
            yield service
        finally:
            service.library.close()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def library_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ExitStack() as stack:
        home: Postgres | None = None
        if request.param == "postgres":
            home = stack.enter_context(closing(Postgres(request.getfixturevalue("postgres").new_database())))
            home.join("http://a")
        for service in opened(tmp_path_factory.mktemp("docs"), home=home):
            with serving(service, KEYS) as url:
                yield url


@pytest.fixture
def ann(library_url: str) -> Iterator[openai.OpenAI]:
    yield from client(library_url, "ann")


@pytest.fixture
def raw(library_url: str) -> Iterator[httpx.Client]:
    with client_of(library_url, "ann") as made:
        yield made


def client(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made


def test_a_file_is_uploaded_listed_given_back_and_deleted(ann: openai.OpenAI) -> None:
    file = ann.files.create(file=("boat.txt", BOAT.encode()), purpose="user_data")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "boat.txt", len(BOAT), "user_data")
    assert file.id.startswith("file-")
    assert ann.files.retrieve(file.id) == file
    assert file in list(ann.files.list(purpose="user_data"))
    assert file not in list(ann.files.list(purpose="assistants"))
    assert ann.files.content(file.id).read() == BOAT.encode()
    assert ann.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(file.id)


def test_files_are_listed_in_pages(ann: openai.OpenAI) -> None:
    made = [ann.files.create(file=(f"{i}.txt", b"x"), purpose="fine-tune").id for i in range(5)]
    for order, wanted in (("asc", made), ("desc", made[::-1])):
        pages = ann.files.list(purpose="fine-tune", limit=2, order=order)  # type: ignore[arg-type]
        assert len(pages.data) == 2
        assert [file.id for file in pages] == wanted
    for file_id in made:
        ann.files.delete(file_id)


def test_a_vector_store_is_made_searched_and_deleted(ann: openai.OpenAI) -> None:
    boat = ann.files.create(file=("boat.txt", BOAT.encode()), purpose="assistants")
    store = ann.vector_stores.create(name="mine", file_ids=[boat.id], metadata={"team": "sea"})
    assert store.metadata == {"team": "sea", "zone": "cloud"}
    assert store.name == "mine"
    train = ann.vector_stores.files.upload_and_poll(
        vector_store_id=store.id,
        file=("train.txt", io.BytesIO(TRAIN.encode())),
        attributes={"year": 1999, "night": True},
        poll_interval_ms=POLL,
    )
    assert (train.status, train.attributes) == ("completed", {"year": 1999, "night": True})
    assert ann.vector_stores.files.poll(boat.id, vector_store_id=store.id, poll_interval_ms=POLL).status == "completed"
    store = ann.vector_stores.retrieve(store.id)
    assert (store.status, store.file_counts.completed, store.file_counts.total) == ("completed", 2, 2)
    assert store.usage_bytes > 0
    found = list(ann.vector_stores.search(store.id, query="who owns the red boat", max_num_results=1))
    assert [(hit.file_id, hit.filename, hit.content[0].text) for hit in found] == [(boat.id, "boat.txt", BOAT)]
    assert 0 < found[0].score <= 1
    both = list(ann.vector_stores.search(store.id, query=["red boat", "night train"], rewrite_query=True))
    assert {hit.file_id for hit in both} == {boat.id, train.id}
    late = list(
        ann.vector_stores.search(
            store.id,
            query="boat or train",
            filters={"type": "and", "filters": [{"type": "gte", "key": "year", "value": 1999}]},
            ranking_options={"ranker": "auto", "score_threshold": 0.0},
        )
    )
    assert [hit.file_id for hit in late] == [train.id]
    assert list(ann.vector_stores.search(store.id, query="boat", ranking_options={"score_threshold": 0.99})) == []
    assert [part.text for part in ann.vector_stores.files.content(train.id, vector_store_id=store.id)] == [TRAIN]
    assert {file.id for file in ann.vector_stores.files.list(store.id, filter="completed")} == {boat.id, train.id}
    changed = ann.vector_stores.files.update(train.id, vector_store_id=store.id, attributes={"year": 2001})
    assert changed.attributes == {"year": 2001}
    assert ann.vector_stores.files.delete(train.id, vector_store_id=store.id).deleted
    assert [hit.file_id for hit in ann.vector_stores.search(store.id, query="night train")] == [boat.id]
    assert ann.vector_stores.update(store.id, name="ours").name == "ours"
    assert store.id in {one.id for one in ann.vector_stores.list(limit=1)}
    assert ann.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.vector_stores.search(store.id, query="boat")
    assert ann.files.content(train.id).read() == TRAIN.encode(), "the file itself stays"


def test_files_are_read_in_batches(ann: openai.OpenAI) -> None:
    store = ann.vector_stores.create(name="batch")
    batch = ann.vector_stores.file_batches.upload_and_poll(
        store.id,
        files=[(f"{i}.txt", f"{BOAT} Number {i}.".encode()) for i in range(6)] + [("bad.bin", b"\0")],
        poll_interval_ms=POLL,
    )
    assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 6, 1)
    files = ann.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, limit=3)
    assert len(list(files)) == 7
    (bad,) = ann.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, filter="failed")
    assert bad.last_error is not None and bad.last_error.code == "unsupported_file"
    assert "convert it to text" in bad.last_error.message
    cancelled = ann.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)
    assert cancelled.status == "completed", "nothing was left to cancel"
    given = ann.vector_stores.file_batches.create_and_poll(
        store.id, files=[{"file_id": bad.id, "attributes": {"a": "b"}}], poll_interval_ms=POLL
    )
    assert (given.status, given.file_counts.total) == ("failed", 1)


def test_static_chunking_is_honoured(ann: openai.OpenAI) -> None:
    text = " ".join(f"Sentence {i} about the boat." for i in range(300))
    numbers = []
    for size, overlap in ((100, 0), (400, 200)):
        store = ann.vector_stores.create()
        file = ann.vector_stores.files.upload_and_poll(
            vector_store_id=store.id,
            file=("long.txt", text.encode()),
            chunking_strategy={
                "type": "static",
                "static": {"max_chunk_size_tokens": size, "chunk_overlap_tokens": overlap},
            },
            poll_interval_ms=POLL,
        )
        assert file.chunking_strategy is not None and file.chunking_strategy.type == "static"
        assert file.chunking_strategy.static.max_chunk_size_tokens == size
        numbers.append(len(list(ann.vector_stores.search(store.id, query="boat", max_num_results=50))))
    assert numbers[0] >= 15 > numbers[1] >= 4


def test_uploads_at_once_are_all_there_and_whole(raw: httpx.Client) -> None:
    bodies = [bytes([65 + i]) * (200_000 + i) for i in range(12)]

    def upload(body: bytes) -> str:
        files = {"file": ("same.txt", body)}
        return str(raw.post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"])

    with ThreadPoolExecutor(12) as pool:
        ids = list(pool.map(upload, bodies))
    assert len(set(ids)) == 12
    assert [raw.get(f"/v1/files/{file_id}/content").content for file_id in ids] == bodies


def test_empty_and_binary_files_are_kept_as_they_are(ann: openai.OpenAI) -> None:
    for content in (b"", bytes(range(256)) * 5000):
        file = ann.files.create(file=("x.bin", content), purpose="user_data")
        assert file.bytes == len(content)
        assert ann.files.content(file.id).read() == content


def test_a_file_beyond_the_limit_is_refused_and_leaves_nothing(
    raw: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 100_000)
    before = raw.get("/v1/files").json()["data"]
    for size in (100_001, 300_000):  # found when the file is complete; found by content-length
        answer = raw.post("/v1/files", files={"file": ("x", b"x" * size)}, data={"purpose": "batch"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    boundary = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    answer = raw.post("/v1/files", headers=boundary, content=iter([head, *[b"x" * 50_000] * 6]))  # chunked
    assert answer.status_code == 413
    assert raw.post("/v1/files", files={"file": ("x", b"x" * 100_000)}, data={"purpose": "batch"}).status_code == 200
    assert len(raw.get("/v1/files").json()["data"]) == len(before) + 1


def test_an_upload_that_is_cut_off_leaves_nothing(raw: httpx.Client, library_url: str) -> None:
    before = raw.get("/v1/files").json()["data"]
    with connected(library_url) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer ann\r\ncontent-length: 9000\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n\r\n"
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\nhalf of it'
        )
    assert raw.get("/v1/files").json()["data"] == before


def test_an_invalid_upload_is_refused_by_name(raw: httpx.Client) -> None:
    x, form = {"file": ("x", b"x")}, {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="%s"; filename="x"\r\n\r\nx\r\n'
    cases = [
        (raw.post("/v1/files", json={"file": "x", "purpose": "batch"}), None),
        (raw.post("/v1/files", files=x), "purpose"),
        (raw.post("/v1/files", files=x, data={"purpose": "fun"}), "purpose"),
        (raw.post("/v1/files", files={"other": ("x", b"x")}, data={"purpose": "batch"}), "file"),
        (raw.post("/v1/files", files={"purpose": (None, "batch"), "file": (None, "no file")}), "file"),
        (raw.post("/v1/files", files=x, data={"purpose": "batch", "expires_after[seconds]": "9"}), "expires_after"),
        (raw.post("/v1/files", headers={"content-type": "multipart/form-data"}, content=b"x"), None),
        (raw.post("/v1/files", headers=form, content=b"nothing of the kind"), None),
        (raw.post("/v1/files", headers=form, content=part % b"file" + part % b"more" + b"--b--\r\n"), None),
        (raw.post("/v1/files", headers=form, content=b"--b\r\n\r\nno name\r\n--b--\r\n"), None),
        (raw.post("/v1/files", headers={"content-type": "multipart/form-data; boundary=b; charset=idna"},
                  content=part % b"\xff\xff" + b"--b--\r\n"), "file"),
        (raw.post("/v1/files", files=x, data={"purpose": "b" * 5000}), None),
        (raw.post("/v1/files", files=x, data={f"f{i}": "x" for i in range(20)}), None),
    ]  # fmt: skip
    for answer, param in cases:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_invalid_store_request_is_refused_by_name(raw: httpx.Client) -> None:
    store = raw.post("/v1/vector_stores", json={}).json()["id"]
    cases: list[tuple[str, dict[str, object], str]] = [
        ("", {"metadata": {"zone": "device"}}, "metadata.zone"),
        ("", {"metadata": {"zone": "moon"}}, "metadata.zone"),
        ("", {"metadata": {str(i): "x" for i in range(16)}}, "metadata"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata.a"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 1}}, "expires_after"),
        ("", {"name": 7}, "name"),
        ("", {"file_ids": ["x"] * 501}, "file_ids"),
        ("", {"chunking_strategy": {"type": "static"}}, "chunking_strategy.static"),
        ("", {"chunking_strategy": {"type": "other"}}, "chunking_strategy.type"),
        ("/{store}/files", {}, "file_id"),
        ("/{store}/file_batches", {}, "file_ids"),
        ("/{store}/file_batches", {"file_ids": ["x"], "files": [{"file_id": "x"}]}, "file_ids"),
        ("/{store}/file_batches", {"file_ids": []}, "file_ids"),
        ("/{store}/file_batches", {"files": []}, "files"),
        ("/{store}/search", {}, "query"),
        ("/{store}/search", {"query": ""}, "query"),
        ("/{store}/search", {"query": []}, "query"),
        ("/{store}/search", {"query": "x", "max_num_results": 51}, "max_num_results"),
        (
            "/{store}/search",
            {"query": "x", "ranking_options": {"score_threshold": 2}},
            "ranking_options.score_threshold",
        ),
        (
            "/{store}/search",
            {"query": "x", "ranking_options": {"hybrid_search": {"text_weight": 1}}},
            "ranking_options.hybrid_search",
        ),
        ("/{store}/search", {"query": "x", "filters": {"type": "eq", "key": "a"}}, "filters.value"),
        ("/{store}/search", {"query": "x", "filters": {"type": "like", "key": "a", "value": 1}}, "filters.type"),
        ("/{store}/search", {"query": "x", "filters": {"type": "in", "key": "a", "value": 1}}, "filters"),
        ("/{store}/search", {"query": "x", "filters": {"type": "gt", "key": "a", "value": True}}, "filters"),
        ("/{store}/search", {"query": "x", "filters": {"type": "and", "filters": []}}, "filters.filters"),
    ]
    for path, body, param in cases:
        answer = raw.post("/v1/vector_stores" + path.format(store=store), json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_filters_have_a_size(raw: httpx.Client) -> None:
    store = raw.post("/v1/vector_stores", json={}).json()["id"]
    one: dict[str, object] = {"type": "eq", "key": "a", "value": 1}
    many = {"type": "or", "filters": [{"type": "and", "filters": [one] * 60}] * 2}
    deep = one
    for _ in range(200):
        deep = {"type": "and", "filters": [deep]}
    for condition in (many, deep, {"type": "in", "key": "a", "value": [1] * 101}):
        answer = raw.post(f"/v1/vector_stores/{store}/search", json={"query": "x", "filters": condition})
        assert answer.status_code == 400


def test_an_invalid_page_query_is_refused(raw: httpx.Client) -> None:
    for query in ("limit=0", "limit=101", "limit=x", "limit=", "order=up", "after=vs_0", "before=vs_0"):
        answer = raw.get(f"/v1/vector_stores?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_device_manages_its_own(tmp_path: Path) -> None:
    for service in opened(tmp_path, "device"):
        with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as local:
            assert local.vector_stores.create(metadata={"zone": "device"}).metadata == {"zone": "device"}
            with pytest.raises(openai.BadRequestError, match="managed at the server"):
                local.vector_stores.create(metadata={"zone": "cloud"})


def test_a_side_without_documents_says_so(http: httpx.Client) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/vector_stores")):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_documents")
