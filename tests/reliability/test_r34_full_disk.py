"""R34: a disk that takes no more, at every place a server writes: told without paths, nothing damaged, and then over.

Three ways: the kernel refuses the running server's writes beyond a length (RLIMIT_FSIZE), which needs no rights and no
disk of its own, and which SQLite takes for an error of the disk; a disk of its own that is full (ENOSPC); and one on
which writing back fails, so that fsync says EIO and what it was called for is lost. The last two need the rights to
mount. Not tried: reads that fail.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.commands.demo import Children
from tests.e2e.pair import Server
from tests.postgres import RealPostgres, home, on_postgres, sound
from tests.reliability.conftest import Figure, Size
from tests.reliability.streams import until

LIMIT = 48 << 10  # bytes of any file: the programs' logs are shorter
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
REFUSED = {503, 507}


@contextmanager
def full(server: Server) -> Iterator[None]:
    """No file of the server grows beyond LIMIT."""
    pid = server.child.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)


def mounted(folder: Path, *arguments: str) -> None:
    folder.mkdir(mode=0o700)
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments, str(folder)], check=False).returncode:
        pytest.skip("only who may mount has a disk to fill")


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A file system of its own in that folder."""
    mounted(folder, "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def failing_disk(folder: Path, image: Path) -> Iterator[None]:
    """A file system whose disk is a sparse file `image`, made if there is none: where that cannot grow, writing back
    fails with EIO."""
    if not image.exists():
        with image.open("wb") as stream:
            stream.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1", str(image)], check=True)
    mounted(folder, "-o", "loop", str(image))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def ballast(folder: Path) -> Iterator[None]:
    """No room is left on the disk of this folder."""
    file = folder / "ballast"
    try:
        with file.open("wb", buffering=0) as stream, suppress(OSError):
            while True:
                stream.write(bytes(4096))
        yield
    finally:
        file.unlink()


def write_all(server: Server, number: int) -> dict[str, httpx.Response]:
    """One request for each place that a server writes to."""
    chat: dict[str, Any] = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": f"{number}?"}]}
    stored: dict[str, Any] = {"model": "fake", "max_output_tokens": 16, "input": "word " * 500}
    return {
        "large upload": server.call(
            "POST", "/v1/files", files={"file": ("a.txt", b"a" * 3 * LIMIT)}, data={"purpose": "assistants"}
        ),
        "spooled upload": server.call(
            "POST", "/v1/files", files={"file": ("b.txt", b"b" * (3 << 20))}, data={"purpose": "assistants"}
        ),
        "vector store": server.call("POST", "/v1/vector_stores", json={"metadata": {"note": "n" * 500}}),
        "stored response": server.call("POST", "/v1/responses", json=stored),
        "chat": server.call("POST", "/v1/chat/completions", json=chat),
        "reading": server.call("GET", "/v1/files"),
        "health": server.call("GET", "/healthz"),
    }


def writes(server: Server) -> bool:
    return {answer.status_code for answer in write_all(server, 0).values()} == {200}


def refused(server: Server, rounds: int) -> Counter[str]:
    """Count the refusals of each place, where there is no room. What needs none is done, and no path is told."""
    found: Counter[str] = Counter()
    for number in range(1, rounds + 1):
        for name, answer in write_all(server, number).items():
            expected = {200} if name in ("chat", "reading", "health") else {200, *REFUSED}
            assert answer.status_code in expected, (name, answer.text)
            assert not any(word in answer.text for word in (str(server.state.parent), "sqlite", "pg_tblspc")), (
                answer.text
            )
            found[name] += answer.status_code in REFUSED
    return found


def goes_on(server: Server) -> float:
    """s until every write succeeds. It is sound then, and so is what another process finds after `kill -9`."""
    began = time.monotonic()
    while not writes(server):
        assert time.monotonic() - began < 60, "it does not write again"
    took = time.monotonic() - began
    server.kill()
    sound(server.state)
    assert not list(server.state.rglob("*.part")), "half a file"
    server.start()
    assert writes(server)
    return took


def test_a_full_disk_is_told_without_paths_and_damages_nothing(server: Server, size: Size, figure: Figure) -> None:
    assert writes(server)
    kept, rounds = server.call("GET", "/v1/files").json()["data"], size(8, 200)
    with full(server):
        counts = refused(server, rounds)
        assert server.call("GET", "/v1/files").json()["data"] == kept
    for name, count in counts.items():
        figure(f"{name}: refused of {rounds}", count)
    assert counts["large upload"] == counts["spooled upload"] == rounds
    hit = home(server.state) is None  # rows of a database are on its disk
    assert bool(counts["vector store"]) == bool(counts["stored response"]) == hit
    figure("writes again after", goes_on(server), unit="s")


def test_a_disk_without_a_byte_left_is_told_and_damages_nothing(tmp_path: Path, size: Size, figure: Figure) -> None:
    state, rounds = tmp_path / "state", size(2, 60)
    with small_disk(state, 32), Children(tmp_path) as children:
        server = Server(children, tmp_path)
        assert writes(server)
        kept = server.call("GET", "/v1/files").json()["data"]
        with ballast(state):
            counts = refused(server, rounds)
            assert server.call("GET", "/v1/files").json()["data"] == kept
        for name, count in counts.items():
            figure(f"no byte left: {name}, refused of {rounds}", count)
        assert counts["large upload"] == counts["spooled upload"] == rounds
        assert bool(counts["vector store"]) == bool(counts["stored response"]) == (home(state) is None)
        goes_on(server)
        server.kill()


def test_a_database_without_a_byte_left_is_told_and_loses_nothing(
    tmp_path: Path, postgres: RealPostgres, size: Size, figure: Figure, rng: random.Random
) -> None:
    """Where its tables lie; its log has a disk of its own, without which PostgreSQL ends."""
    rounds = size(3, 60)
    with ExitStack() as opened:
        disk = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="disk-"))) / "rows"  # pytest's are root's
        opened.enter_context(small_disk(disk, 96))
        own, children = opened.enter_context(on_postgres(postgres)), opened.enter_context(Children(tmp_path))
        own.urls[tmp_path / "state"] = postgres.new_database(disk)
        server = Server(children, tmp_path)
        assert writes(server)
        held = server.call("GET", "/v1/files").json()["data"]
        counts: Counter[str] = Counter()
        with ballast(disk):
            for _ in range(rounds):
                counts += refused(server, 1)
                upload = {"file": ("a.bin", rng.randbytes(1 << 20))}  # which PostgreSQL cannot make smaller
                answer = server.call("POST", "/v1/files", files=upload, data={"purpose": "user_data"})
                assert answer.status_code == 507 and "pg_tblspc" not in answer.text, answer.text
            files = server.call("GET", "/v1/files").json()["data"]
            assert files[-len(held) :] == held and not [each for each in files if each["filename"] == "a.bin"]
        for name, count in counts.items():
            figure(f"no byte left in a database: {name}, refused of {rounds}", count)
        figure("a database's disk: writes again after", goes_on(server), unit="s")
        server.kill()
        postgres.drop(own.urls.pop(server.state))


@pytest.mark.embedded("a failing disk")
def test_what_was_acknowledged_is_on_a_disk_whose_writes_failed_meanwhile(
    tmp_path: Path, size: Size, figure: Figure
) -> None:
    """fsync fails, and what the page cache holds is not on the disk. The process is killed, the disk mounted anew."""
    uploads = size(12, 200)
    backing, state, image = tmp_path / "backing", tmp_path / "state", tmp_path / "backing" / "image"
    with small_disk(backing, 12), Children(tmp_path) as children:
        with failing_disk(state, image):
            server = Server(children, tmp_path)
            acknowledged, refused = [server.upload("before.txt")], 0
            with ballast(backing):
                for number in range(uploads):
                    name = f"note-{number}.txt"
                    answer = server.call(
                        "POST", "/v1/files", files={"file": (name, name * 9000)}, data={"purpose": "assistants"}
                    )
                    assert answer.status_code in {200, *REFUSED}, answer.text
                    if answer.status_code == 200:
                        acknowledged.append(answer.json()["id"])
                    refused += answer.status_code in REFUSED
                    assert server.call("GET", "/healthz").status_code == 200
                server.kill()
                before = set(acknowledged)
        state.rmdir()
        with failing_disk(state, image):
            sound(state)
            server.start()
            held = {each["id"] for each in server.call("GET", "/v1/files").json()["data"]}
            assert before <= held, "an acknowledged file is lost"
            for each in before:
                assert server.call("GET", f"/v1/files/{each}/content").status_code == 200
            until(lambda: writes(server))
            server.kill()
    figure("failing fsync: uploads acknowledged, all held", len(acknowledged))
    figure(f"failing fsync: uploads refused of {uploads}", refused, at_least=1)
