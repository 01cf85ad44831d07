"""Waiting for changes of files, on the real file system."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

from paceline.rag.folders import changes


def test_changes_are_told_from_the_first_turn_on_until_it_is_stopped(tmp_path: Path) -> None:
    turns: Queue[int] = Queue()
    stop = threading.Event()

    def watch() -> None:
        for number, _ in enumerate(changes([tmp_path], stop)):
            turns.put(number)
        turns.put(-1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert turns.get(timeout=60) == 0, "before anything has changed"
    (tmp_path / ".hidden.md").write_text("not read")
    (tmp_path / "documents.sqlite-wal").write_bytes(b"of a store that lies here")
    (tmp_path / "a.md").write_text("Something.")
    assert turns.get(timeout=60) == 1
    (tmp_path / "a.md").unlink()
    assert turns.get(timeout=60) == 2
    stop.set()
    assert turns.get(timeout=60) == -1
    thread.join(60)
