"""Document stores in real processes: killed during changes, and two at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from tests.rag.store.killed import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]

# Changes the store in a loop and sends itself SIGKILL just before its n-th SQL statement. Run by
# tests/reliability/test_r09_power_cut.py.
CHANGER = (
    STEPS
    + """
sqlite3.connect = traced
DocumentStore.chunk_tokens, DocumentStore.overlap = 16, 4
store = DocumentStore.open(Path(sys.argv[1]), HashEmbedder(), encrypt=sys.argv[3:] == ["encrypt"])
i = 0
while True:
    body = " ".join(f"Sentence {n} of version v{i}." for n in range(20))
    store.add_text(f"document{i % 3}.txt", body, zone="device")
    if i % 4 == 3:
        store.remove(f"document{i % 3}.txt")
    i += 1
"""
)

ADDER = """
import sys
from pathlib import Path
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore

who = sys.argv[2]
with DocumentStore.open(Path(sys.argv[1]), HashEmbedder()) as store:
    print("open", flush=True)
    sys.stdin.readline()
    for i in range(10):
        store.add_text(f"{who}{i}.txt", f"Fact {i} that {who} wrote.", zone="device")
        store.add_text("shared.txt", f"Version {i} by {who}.", zone="device")
"""


def test_text_of_a_killed_removal_is_erased_when_the_store_is_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with DocumentStore.open(folder, HashEmbedder()) as store:
        store.add_text("secret.txt", "The quixotic plan.", zone="device")
    code = """
import os, signal, sys
from pathlib import Path
from paceline.rag.database import Database
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
store = DocumentStore.open(Path(sys.argv[1]), HashEmbedder())
Database.checkpoint = lambda self: os.kill(os.getpid(), signal.SIGKILL)
store.remove("secret.txt")
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    with DocumentStore.open(folder, HashEmbedder()) as store:
        assert store.count() == 0
        assert not any(b"quixotic" in file.read_bytes() for file in folder.iterdir())


def test_an_open_store_sees_what_two_other_processes_add_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "store"  # created by the first of the two
    adders = [
        subprocess.Popen(
            [sys.executable, "-c", ADDER, str(folder), who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for who in ("anna", "bert")
    ]
    try:
        for adder in adders:
            assert adder.stdout is not None
            assert adder.stdout.readline() == "open\n"
        with DocumentStore.open(folder, HashEmbedder()) as store:
            assert store.search("Fact 9 that anna wrote", 1) == []
            for adder in adders:
                assert adder.stdin is not None
                adder.stdin.write("go\n")
                adder.stdin.flush()
            while any(adder.poll() is None for adder in adders):  # every passage found meanwhile is whole
                assert all(passage.text for passage in store.search("Fact 9 that anna wrote", 5))
            for adder in adders:
                assert adder.wait(60) == 0
            assert store.count() == 21
            for who in ("anna", "bert"):
                for i in range(10):
                    (passage,) = store.search(f"Fact {i} that {who} wrote", 1)
                    assert passage.document == f"{who}{i}.txt"
            store.remove("anna9.txt")
            assert store.search("Fact 9 that anna wrote", 1, min_score=0.99) == []
    finally:
        for adder in adders:
            adder.kill()
            adder.communicate()
