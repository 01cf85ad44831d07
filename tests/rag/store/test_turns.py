"""Turns of owners: no file of one holds up another's, whether it is long to embed or endless to parse."""

from __future__ import annotations

import contextlib
import errno
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from paceline.errors import StorageError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.parsing.process import BUDGET_S, Around, Parsed, ParserPool
from paceline.rag.records import Vectors
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import MAX_STARTS, TURN_CHUNKS, Ingester, Library
from paceline.rag.store.vector_stores import Counts, FileSpec
from tests.rag.parsing.made import ENDLESS, pdf, shown
from tests.rag.store.test_library import ANN, BERT, settled


class Noting(HashEmbedder):
    """Notes the first word of each batch, and waits for what is parsed before the second batch of a text."""

    def __init__(self) -> None:
        self.batches: list[str] = []
        self.parsed: list[Future[Parsed]] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        word = texts[0].split()[0]
        if word in self.batches:
            while not all(future.done() for future in self.parsed):
                pass
        self.batches.append(word)
        return super().embed(texts)


@pytest.fixture
def embedder() -> Noting:
    return Noting()


@pytest.fixture
def library(tmp_path: Path, embedder: Noting) -> Iterator[Library]:
    with DocumentStore.open(tmp_path / "docs", embedder) as documents:
        opened = Library(documents, "cloud")
        yield opened
        opened.close()


def attached(library: Library, owner: str, data: bytes, name: str = "note.txt") -> tuple[str, str]:
    """A store of one file: (store, file)."""
    file = library.uploads.add(owner, name, "assistants", io.BytesIO(data)).id
    return library.stores.create(owner, "", {}, [FileSpec(file)]).id, file


def parsing(library: Library) -> list[psutil.Process]:
    """The processes that parse a document now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        pids = [each.pid for each in list(library._ingester._parsers._busy) if each.pid is not None]
        return [child for pid in pids for child in psutil.Process(pid).children()]
    return []


def test_a_small_file_is_embedded_between_two_batches_of_a_long_one(
    library: Library, embedder: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ParserPool.submit

    def noted(
        self: ParserPool, name: str, open_document: Callable[[], BinaryIO], around: Around, *, owner: str
    ) -> Future[Parsed]:
        embedder.parsed.append(submit(self, name, open_document, around, owner=owner))
        return embedder.parsed[-1]

    monkeypatch.setattr(ParserPool, "submit", noted)
    long, _ = attached(library, ANN, b"long " * 160 * TURN_CHUNKS * 20)
    small, _ = attached(library, BERT, b"small")
    library.start()
    assert settled(library, small, BERT) == settled(library, long, ANN) == Counts(completed=1)
    assert embedder.batches.count("long") >= 20
    assert embedder.batches.index("small") <= 2, "the long file has had two turns at most"


def test_a_file_without_end_holds_up_nobody_and_may_be_deleted(library: Library) -> None:
    endless, file = attached(library, ANN, ENDLESS, "endless.rtf")
    library.start()
    for _ in range(3):
        small, _ = attached(library, BERT, b"small")
        assert settled(library, small, BERT) == Counts(completed=1)
    assert library.stores.get(ANN, endless).counts == Counts(in_progress=1)
    library.delete_file(ANN, file)
    assert library.stores.get(ANN, endless).counts == Counts()


def test_a_file_whose_parser_is_killed_again_and_again_is_given_up_with_its_reason(library: Library) -> None:
    store, file = attached(library, ANN, ENDLESS, "endless.rtf")
    library.start()
    killed: set[int] = set()
    while library.stores.get(ANN, store).counts.in_progress:
        for child in parsing(library):
            if child.pid not in killed:
                killed.add(child.pid)
                child.kill()
    assert len(killed) == MAX_STARTS
    given_up = library.stores.attached(ANN, store, file)
    assert (given_up.status, given_up.error_code) == ("failed", "server_error")
    assert "or its parser ended 3 times" in given_up.error_message
    small, _ = attached(library, ANN, b"small")
    assert settled(library, small, ANN) == Counts(completed=1), "the next file is read"


@pytest.mark.parametrize("lacking", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "fork")])
def test_a_file_waits_where_the_machine_gives_no_thread_or_process(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: Exception
) -> None:
    monkeypatch.setattr("paceline.rag.store.library.RETRY_S", 0.0)
    submit, refusals = ParserPool.submit, iter([lacking] * (MAX_STARTS + 1))

    def refused(
        self: ParserPool, name: str, open_document: Callable[[], BinaryIO], around: Around, *, owner: str
    ) -> Future[Parsed]:
        for each in refusals:
            raise each
        return submit(self, name, open_document, around, owner=owner)

    monkeypatch.setattr(ParserPool, "submit", refused)
    store, _ = attached(library, ANN, b"small")
    library.start()
    assert settled(library, store, ANN) == Counts(completed=1)
    assert caplog.text.count("trying again") == MAX_STARTS + 1


def failing(real: Callable[..., object], fault: Exception) -> Callable[..., object]:
    """A method that fails more often than a file is begun."""
    left = iter(range(MAX_STARTS + 1))

    def method(*arguments: object) -> object:
        for _ in left:
            raise fault
        return real(*arguments)

    return method


@pytest.mark.parametrize("lost_in", [["_check"], ["_read", "_forget_starts"]], ids=["the file", "its start"])
def test_a_database_that_is_lost_again_and_again_is_no_fault_of_the_file_that_is_read(
    library: Library, monkeypatch: pytest.MonkeyPatch, lost_in: list[str]
) -> None:
    monkeypatch.setattr("paceline.rag.store.library.AWAY_S", 0.0)
    for name in lost_in:
        away = StorageError("the database cannot be reached", away=True)
        fault = BlockingIOError(errno.EAGAIN, "fork") if name == "_read" else away
        monkeypatch.setattr(Ingester, name, failing(getattr(Ingester, name), fault))
    store, _ = attached(library, ANN, b"small")
    library.start()
    assert settled(library, store, ANN) == Counts(completed=1)


def test_a_file_of_an_owner_whose_seconds_are_used_up_fails_with_the_time_to_try_again(library: Library) -> None:
    library.budget.spend(ANN, BUDGET_S)
    store, file = attached(library, ANN, b"small")
    library.start()
    assert settled(library, store, ANN) == Counts(failed=1)
    failed = library.stores.attached(ANN, store, file)
    assert failed.error_code == "server_error" and "again in 60 min" in failed.error_message
    other, _ = attached(library, BERT, b"small")
    assert settled(library, other, BERT) == Counts(completed=1)


def test_stopping_ends_what_is_parsed_and_the_next_start_reads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rag.store.library.MAX_STARTS", 1)
    with DocumentStore.open(tmp_path / "docs", HashEmbedder()) as documents:
        store = ""
        for _ in range(3):  # a proper stop is none of the file's failures
            library = Library(documents, "cloud")
            store = store or attached(library, ANN, ENDLESS, "endless.rtf")[0]
            library.start()
            while not (children := parsing(library)):
                pass
            library.close()
            psutil.wait_procs(children, timeout=120)
            assert not children[0].is_running()
        library = Library(documents, "cloud")
        assert library.stores.get(ANN, store).counts == Counts(in_progress=1)
        library.close()


def test_the_text_of_a_file_is_kept_and_goes_with_it(library: Library, tmp_path: Path) -> None:
    store, file = attached(library, ANN, pdf([shown("The quixotic lamp.")], "Lamps"), "lamps.pdf")
    library.start()
    assert settled(library, store, ANN) == Counts(completed=1)
    assert library.text(ANN, store, file) == "The quixotic lamp."
    (hit,) = library.search(ANN, [store], ["quixotic lamp"], 1)
    assert hit.passage.titled == "Lamps, page 1\nThe quixotic lamp."
    library.delete_file(ANN, file)
    assert not [path for path in (tmp_path / "docs").rglob("*") if path.is_file() and b"quixotic" in path.read_bytes()]
