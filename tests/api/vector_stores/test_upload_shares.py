"""Shares of uploads: another key's upload goes on beside as many of one key as may arrive at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from paceline.api.http.auth import Identity
from paceline.api.vector_stores import UploadTurns, create_file
from paceline.rag.store.files import MAX_ARRIVING, Arrival
from paceline.rag.store.library import Library
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


Uploads = tuple[Library, UploadTurns]


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Uploads]:
    for service in opened(tmp_path):
        assert service.library is not None
        yield service.library, UploadTurns()


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

    class Noted(UploadTurns):
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
