"""What models have said of passages: it goes with the document, with its owner, and is sealed as the document is."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.rag import rows
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import MANAGED
from paceline.rag.store.documents import DocumentStore
from paceline.sql import Home

SAID = "The boat of XYZZYVELDA is red."


def test_it_goes_with_its_document_and_with_its_owner(tmp_path: Path, home: Home | None) -> None:
    with DocumentStore.open(tmp_path / "docs", HashEmbedder(), home=home) as store:
        for name in ("a.md", "b.md"):
            store.add_text(name, f"The boat of {name} is red.", zone="cloud")
        first, second = (each.chunk_id for each in store.whole(MANAGED))
        for number, (chunk, owner) in enumerate(((first, "anna"), (second, "anna"), (second, "ben"))):
            store.keep_reading(chunk, f"asked {number}", owner, f"{SAID} {number}")
        store.keep_reading(second, "asked 2", "ben", "another")  # the first one stays
        assert store.find_reading(second, "asked 2") == f"{SAID} 2"
        assert store.find_reading(first, "asked 2") is None
        store.forget_readings("anna")
        assert [store.find_reading(second, f"asked {number}") for number in (1, 2)] == [None, f"{SAID} 2"]
        store.remove("b.md")
        assert store.find_reading(second, "asked 2") is None
        store.keep_reading(second, "asked 3", "ben", SAID)  # of what has been removed meanwhile
        assert store.find_reading(second, "asked 3") is None


@pytest.mark.parametrize("encrypt", [False, True])
def test_on_the_disk_it_is_sealed_as_its_document_and_gone_with_it(tmp_path: Path, encrypt: bool) -> None:
    folder = tmp_path / "docs"

    def stored() -> bool:
        return any(b"XYZZYVELDA" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())

    with DocumentStore.open(folder, HashEmbedder(), side="device", encrypt=encrypt) as store:
        store.add_text("boat.md", "A red boat.", zone="device")
        (passage,) = store.whole(MANAGED)
        store.keep_reading(passage.chunk_id, "asked", "", SAID)
    assert stored() is not encrypt
    with DocumentStore.open(folder, HashEmbedder(), side="device") as store:
        assert store.find_reading(passage.chunk_id, "asked") == SAID
        if not encrypt:
            store.encrypt()
            assert not stored() and store.find_reading(passage.chunk_id, "asked") is None
        store.remove("boat.md")
    assert not stored()


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_READINGS", 3)
    with DocumentStore.open(tmp_path / "docs", HashEmbedder()) as store:
        store.add_text("boat.md", "A red boat.", zone="cloud")
        (passage,) = store.whole(MANAGED)
        for number in range(5):
            store.keep_reading(passage.chunk_id, str(number), "", SAID)
        kept = [number for number in range(5) if store.find_reading(passage.chunk_id, str(number)) is not None]
    assert kept == [2, 3, 4]


def test_a_store_tells_its_documents_and_what_stands_around_a_chunk(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path / "docs", HashEmbedder(), chunk_tokens=16, overlap=0) as store:
        text = " ".join(f"The boat number {number} of the harbour is red." for number in range(12))
        store.add_text("long.md", text, zone="cloud")
        store.add_text("short.md", "A mill.", zone="cloud")
        chunks = store.whole(MANAGED)
        sizes = dict(store.outline(MANAGED, 2))
        assert sizes == {"long.md": len(chunks) - 1, "short.md": 1} and store.outline(MANAGED, 1) == []
        middle = chunks[2]
        assert store.around(middle.chunk_id, 1) == chunks[1:4] and store.around(middle.chunk_id, 0) == [middle]
        assert store.around(10**6, 1) == []
