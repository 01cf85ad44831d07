"""A database that is damaged or of another format is one sentence that names the file, whichever it is and whoever
opens it."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from paceline.api.responses.store import EventStore
from paceline.commands.main import build
from paceline.errors import PacelineError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.asking import ActivityLog
from server.devices import Registry
from server.keys import Keys

PROGRAMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "keys.sqlite": (("serve",), ("keys", "list"), ("keys", "create", "new")),
    "devices.sqlite": (("serve",), ("devices", "list"), ("devices", "add", "new")),
    "docs/documents.sqlite": (("agent",), ("docs", "search", "old"), ("docs", "add")),
    "responses.sqlite": (("serve",), ("agent",)),
}
CASES = [(file, program) for file, programs in PROGRAMS.items() for program in programs]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("sample")
    Keys(state).create("old")
    Registry(state).add("old")
    EventStore(state).close()
    with DocumentStore.open(state / "docs", HashEmbedder()) as store:
        store.add_text("old.txt", "An old text.", zone="device")
    return state


def run(state: Path, program: tuple[str, ...]) -> None:
    where: tuple[str, ...] = ("--state-dir", str(state))
    if program[0] == "docs":
        note = state / "note.md"
        note.write_text("A note.")
        program = (*program, str(note)) if program[1] == "add" else program
        where = ("--store", str(state / "docs"), "--embedder", "hash")
    elif program[0] in ("serve", "agent"):
        if program[0] == "serve":
            shutil.rmtree(state / "docs")  # a device's
        where = (*where, "--model", "fake", "--port", "0")
    build()([*program, *where], standalone_mode=False)


@pytest.mark.parametrize(("file", "program"), CASES, ids=lambda case: case if isinstance(case, str) else " ".join(case))
def test_a_damaged_file_is_told(sample: Path, tmp_path: Path, file: str, program: tuple[str, ...]) -> None:
    whole = (sample / file).read_bytes()
    damages = [b"no database at all\n" * 1000]
    if program[0] not in ("serve", "agent"):
        damages += [whole[:4096] + b"\xff" * (len(whole) - 4096)]  # its pages are gone
    for number, damage in enumerate(damages):
        state = tmp_path / str(number)
        shutil.copytree(sample, state)
        (state / file).write_bytes(damage)
        with pytest.raises(PacelineError) as caught:
            run(state, program)
        said = str(caught.value)
        assert str(state / file) in said and "\n" not in said and "Traceback" not in said, said
        assert "damaged" in said or "is not a" in said, said


@pytest.mark.parametrize(
    ("file", "version"), [*((file, 99) for file in PROGRAMS), ("keys.sqlite", 0), ("asking.sqlite", 2)]
)
def test_a_file_of_another_format_is_told_and_left_as_it_is(
    sample: Path, tmp_path: Path, file: str, version: int
) -> None:
    state = tmp_path / "state"
    shutil.copytree(sample, state)
    ActivityLog(state).close()
    with closing(sqlite3.connect(state / file)) as rows:
        rows.execute(f"PRAGMA user_version = {version}")
    before = (state / file).read_bytes()
    (program, *_) = PROGRAMS.get(file, (("agent",),))
    with pytest.raises(PacelineError) as told:
        run(state, program)
    assert f"{state / file} was written by another version of Paceline (format {version}, " in str(told.value)
    assert "use that version, or " in str(told.value)
    assert (state / file).read_bytes() == before
