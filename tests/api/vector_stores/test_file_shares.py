"""Shares of uploads and contents: another key's goes on beside as many of one key as may come or go at once."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message, Send

from paceline.api.http.auth import Identity
from paceline.api.http.body import BrokenOffError
from paceline.api.vector_stores import MAX_CONTENTS, FileTurns, create_file, give_content
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.files import MAX_ARRIVING, Arrival, StoredFile
from paceline.rag.store.library import Library
from paceline.sealing import DamagedError
from tests.api.scripted import WAIT
from tests.api.vector_stores.test_files import opened

pytestmark = pytest.mark.anyio

ANN, BERT = "ann", "bert"
PARTS = 12  # of a body
HEAD = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f.txt"\r\n\r\n'
)
TAIL = b"\r\n--x--\r\n"


Uploads = tuple[Library, FileTurns]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Uploads]:
    for service in opened(tmp_path):
        assert service.library is not None
        yield service.library, FileTurns()


async def upload(files: Uploads, key: str) -> int:
    """Bytes of a file that is stored, whose parts are there whenever they are asked for."""
    parts = iter([HEAD, *[key.encode() * 100] * PARTS, TAIL])

    async def receive() -> Message:
        await asyncio.sleep(0)  # a part comes from the loop
        part = next(parts)
        return {"type": "http.request", "body": part, "more_body": part is not TAIL}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/files",
        "headers": [(b"content-type", b"multipart/form-data; boundary=x")],
    }
    library, turns = files
    answer = await create_file(Request(scope, receive), library, Identity(key=key), turns)
    assert answer.status_code == 200
    return int(json.loads(bytes(answer.body))["bytes"])


async def test_parts_of_one_key_s_many_uploads_alternate_with_those_of_another_key(files: Uploads) -> None:
    anns, waited = 0, list[int]()

    class Noted(FileTurns):
        async def part(self, owner: str) -> None:
            nonlocal anns
            before = anns
            await super().part(owner)
            if owner == ANN:
                anns += 1
            else:
                waited.append(anns - before)

    uploads = files[0], Noted()
    sizes = await asyncio.gather(*[upload(uploads, ANN) for _ in range(MAX_ARRIVING)], upload(uploads, BERT))
    assert sizes == [PARTS * 100 * len(ANN)] * MAX_ARRIVING + [PARTS * 100 * len(BERT)]
    assert len(waited) >= PARTS and max(waited) <= 2, "parts of Ann's while one of Bert's waits; 32 without turns"


async def test_a_key_whose_uploads_all_wait_for_the_disk_leaves_threads_to_another(
    files: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, on_disk, complete = threading.Event(), threading.Event(), Arrival.complete

    def slow(self: Arrival) -> None:
        if self.owner == ANN:
            on_disk.set()
            assert released.wait(2 * WAIT)
        complete(self)

    monkeypatch.setattr(Arrival, "complete", slow)
    with ThreadPoolExecutor(3) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        anns = [asyncio.create_task(upload(files, ANN)) for _ in range(MAX_ARRIVING)]
        try:
            while not on_disk.is_set():
                await asyncio.sleep(0)
            async with asyncio.timeout(WAIT):
                for _ in range(3):
                    assert await upload(files, BERT) == PARTS * 100 * len(BERT)
        finally:
            released.set()
            await asyncio.gather(*anns)


# ---- contents -------------------------------------------------------------------------------------------------------
MIB = 1 << 20


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[tuple[Library, StoredFile]]:
    """A library with an encrypted file of three pieces."""
    with (
        DocumentStore.open(tmp_path, HashEmbedder(), encrypt=True) as documents,
        closing(Library(documents, "cloud")) as library,
    ):
        yield library, library.uploads.add(ANN, "x.bin", "user_data", io.BytesIO(bytes(3 * MIB - 1)))


async def content(library: Library, file: StoredFile, key: str, turns: FileTurns, send: Send) -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()  # it stays
        raise AssertionError

    await (await give_content(file, library, Identity(key=key), turns))({"type": "http"}, receive, send)


async def test_what_is_not_read_is_in_memory_in_part_and_of_each_owner_a_few(
    sealed: tuple[Library, StoredFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, file = sealed
    turns, begun, read, is_read = FileTurns(), Counter[str](), Counter[str](), asyncio.Event()

    def pieces(_: str) -> Iterator[bytes]:
        for piece in opened_pieces(file.id):
            read["pieces"] += 1
            yield piece

    opened_pieces = library.uploads.pieces
    monkeypatch.setattr(library.uploads, "pieces", pieces)

    async def unread(message: Message) -> None:
        begun[message["type"]] += 1
        if message["type"] == "http.response.body":
            await is_read.wait()

    async def taken(message: Message) -> None:
        read["bytes"] += len(message.get("body", b""))

    asking = [asyncio.create_task(content(library, file, ANN, turns, unread)) for _ in range(MAX_CONTENTS + 4)]
    while begun["http.response.body"] < MAX_CONTENTS:
        await asyncio.sleep(0)
    await content(library, file, BERT, turns, taken)
    assert begun["http.response.start"] == MAX_CONTENTS and read == {
        "pieces": MAX_CONTENTS + 3,
        "bytes": file.num_bytes,
    }
    asking.pop().cancel()  # one that waits
    is_read.set()
    await asyncio.gather(*asking)
    assert begun["http.response.start"] == MAX_CONTENTS + 3
    await content(library, file, ANN, turns, taken)


@pytest.mark.parametrize("damaged", [0, 2], ids=["the first piece", "the last"])
async def test_a_damaged_file_is_refused_or_cut_where_it_is_damaged(
    sealed: tuple[Library, StoredFile], tmp_path: Path, damaged: int
) -> None:
    library, file = sealed
    (path,) = tmp_path.rglob(f"{file.id}*")
    stored = bytearray(path.read_bytes())
    stored[damaged * MIB + 999] ^= 1
    path.write_bytes(stored)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(BrokenOffError if damaged else DamagedError):
        await content(library, file, ANN, FileTurns(), send)
    assert [len(each.get("body", b"")) for each in sent] == [0, MIB, MIB] * bool(damaged)
