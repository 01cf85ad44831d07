"""`paceline docs` against the real store, with the embedder that needs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.commands.main import build
from paceline.errors import ConfigError
from tests.postgres import RealPostgres
from tests.rag.parsing.made import pdf, shown

APP = build(())


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "museum.md").write_text("# Museum\n\nThe museum of Harl opens at nine in the morning.")
    (folder / "cats.txt").write_text("Cats sleep most of the day.")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def docs(*arguments: str) -> Result:
    return CliRunner().invoke(APP, ["docs", *arguments])


def in_hash(*arguments: str) -> Result:
    return docs(*arguments, "--embedder", "hash")


def test_added_documents_are_listed_found_and_removed(notes: Path) -> None:
    added = in_hash("add", str(notes), "--json")
    assert {each["name"]: each["status"] for each in json.loads(added.stdout)} == {
        "museum.md": "added",
        "cats.txt": "added",
        "picture.png": "skipped",
    }
    assert [each["name"] for each in json.loads(in_hash("list", "--json").stdout)] == ["cats.txt", "museum.md"]
    found = json.loads(in_hash("search", "when does the museum of Harl open", "--json").stdout)
    assert found[0]["document"] == "museum.md"
    assert in_hash("remove", "museum.md").output.splitlines() == ["removed  museum.md"]
    assert [each["name"] for each in json.loads(in_hash("list", "--json").stdout)] == ["cats.txt"]


def test_documents_of_a_database_are_added_found_indexed_again_and_removed_by_any_folder(
    notes: Path, postgres: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATABASE", postgres.new_database())

    def at(server: str, *arguments: str) -> Result:
        return in_hash(*arguments, "--side", "cloud", "--state-dir", str(notes.parent / server))

    assert at("a", "add", str(notes), "--sync").exit_code == 0
    assert [each["name"] for each in json.loads(at("b", "list", "--json").stdout)] == ["cats.txt", "museum.md"]
    assert at("b", "reindex").stdout == "2 documents indexed again\n"
    assert json.loads(at("b", "search", "where do cats sleep", "--json").stdout)[0]["document"] == "cats.txt"
    assert at("b", "remove", "cats.txt").stdout == "removed  cats.txt\n"
    assert [each["name"] for each in json.loads(at("a", "list", "--json").stdout)] == ["museum.md"]
    assert not list(notes.parent.rglob("documents.sqlite"))


def test_a_page_is_found_under_its_title_and_what_cannot_be_read_is_told(notes: Path) -> None:
    (notes / "lamps.pdf").write_bytes(pdf([shown("The lamp is lit at six.")], "Lamps"))
    (notes / "scan.pdf").write_bytes(pdf([b""]))
    results = {each["name"]: each for each in json.loads(in_hash("add", str(notes), "--json").stdout)}
    assert (results["lamps.pdf"]["status"], results["scan.pdf"]["status"]) == ("added", "failed")
    found = json.loads(in_hash("search", "when is the lamp lit", "--json").stdout)[0]
    assert (found["document"], found["title"]) == ("lamps.pdf", "Lamps, page 1")
    alone = in_hash("add", str(notes / "scan.pdf"))
    assert alone.exit_code == 1 and "ocrmypdf" in alone.stdout


def test_the_sides_have_stores_of_their_own_and_private_is_the_default(notes: Path, own_state_directory: Path) -> None:
    in_hash("add", str(notes / "cats.txt"))
    in_hash("add", str(notes / "museum.md"), "--side", "cloud")
    listed = {side: json.loads(in_hash("list", "--side", side, "--json").stdout) for side in ("cloud", "device")}
    assert [(each["name"], each["zone"]) for each in listed["cloud"]] == [("museum.md", "cloud")]
    assert [(each["name"], each["zone"]) for each in listed["device"]] == [("cats.txt", "device")]
    assert (own_state_directory / "paceline" / "device" / "docs").is_dir()


def test_the_store_of_the_settings_is_used_and_a_flag_beats_it(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DOCS_DIR", str(tmp_path / "one"))
    in_hash("add", str(notes))
    in_hash("add", str(notes), "--store", str(tmp_path / "two"))
    monkeypatch.delenv("PACELINE_DOCS_DIR")
    in_hash("add", str(notes), "--state-dir", str(tmp_path / "three"))
    assert (tmp_path / "three" / "docs").is_dir()
    monkeypatch.setenv("PACELINE_DOCS_DIR", str(tmp_path / "one"))
    assert (tmp_path / "one").is_dir()
    assert (tmp_path / "two").is_dir()
    (tmp_path / "paceline.toml").write_text("embedder = 'hash'")
    assert len(json.loads(docs("list", "--json").stdout)) == 2


def test_a_store_refuses_the_other_side(notes: Path, tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"))
    in_hash("add", str(notes / "cats.txt"), *store)
    for command in (("list",), ("add", str(notes / "museum.md")), ("search", "cats")):
        refused = in_hash(*command, "--side", "cloud", *store)
        assert refused.exit_code != 0 and refused.exception is not None
        assert "holds private documents of a device" in str(refused.exception)
    assert "cats.txt" in in_hash("list", *store).stdout


def test_folders_patterns_and_all_documents_are_removed(notes: Path) -> None:
    other = notes.parent / "other"
    other.mkdir()
    for name in ("note1.txt", "note2.txt", "plan.txt"):
        (other / name).write_text(f"Of {name} there is one.")
    in_hash("add", str(notes), str(other))
    assert json.loads(in_hash("remove", "note*", "--json").stdout) == {"note*": 2}
    assert json.loads(in_hash("remove", str(other), "--json").stdout) == {str(other): 1}
    assert in_hash("remove").exit_code == 1
    mixed = in_hash("remove", "nobody.md", "cats.txt", "--json")
    assert (mixed.exit_code, json.loads(mixed.stdout)) == (1, {"nobody.md": 0, "cats.txt": 1})
    left = len(json.loads(in_hash("list", "--json").stdout))
    assert json.loads(in_hash("remove", "--all", "--json").stdout) == {"all documents": left}
    assert json.loads(in_hash("list", "--json").stdout) == []


def test_sync_follows_changed_moved_and_deleted_files(notes: Path) -> None:
    in_hash("add", str(notes))
    (notes / "museum.md").unlink()
    (notes / "kept").mkdir()
    (notes / "cats.txt").rename(notes / "kept" / "cats.txt")
    (notes / "new.txt").write_text("Something new.")
    result = in_hash("add", str(notes), "--sync", "--json")
    assert result.exit_code == 0
    told = {each["name"]: each["status"] for each in json.loads(result.stdout)}
    assert told | {"picture.png": ""} == {
        "kept/cats.txt": "moved", "museum.md": "removed", "new.txt": "added", "picture.png": "",
    }  # fmt: skip
    assert {each["name"] for each in json.loads(in_hash("list", "--json").stdout)} == {"kept/cats.txt", "new.txt"}


def test_an_emptied_folder_is_not_taken_for_deleted_files(notes: Path) -> None:
    in_hash("add", str(notes))
    for file in notes.iterdir():
        file.unlink()
    assert "Nothing was changed" in str(in_hash("add", str(notes), "--sync").exception)
    assert len(json.loads(in_hash("list", "--json").stdout)) == 2


def test_what_cannot_be_read_is_a_sentence(notes: Path) -> None:
    (notes.parent / "nothing").mkdir()
    for arguments in (
        ("add", "nothing"),
        ("add", "nowhere", "--sync"),
        ("add", "nowhere", "--watch"),
        ("list", "--store", "notes/cats.txt"),
        ("list", "--config", "nowhere.toml"),
    ):
        assert isinstance(in_hash(*arguments).exception, ConfigError), arguments
    in_hash("add", str(notes))
    assert "no UTF-8" in str(in_hash("search", "caf\udce9").exception)


def test_names_of_links_are_told_to_hold_nothing(notes: Path, tmp_path: Path) -> None:
    (tmp_path / "diary").symlink_to(notes)
    said = in_hash("add", str(tmp_path / "diary")).stderr
    assert f"leads to {notes.resolve()}" in said and "by the name diary." in said
    assert "leads to" not in in_hash("add", str(notes)).stderr


def test_a_store_of_another_embedder_is_refused_until_it_is_indexed_again(notes: Path) -> None:
    in_hash("add", str(notes))
    for asked in (("search", "cats"), ("add", str(notes))):
        assert isinstance(docs(*asked, "--embedder", "minilm").exception, ConfigError)
    listed = json.loads(docs("list", "--embedder", "minilm", "--json").stdout)
    assert docs("remove", listed[-1]["name"], "--embedder", "minilm").exit_code == 0, "nothing is embedded for it"
    assert docs("reindex", "--embedder", "minilm", "--json").exit_code == 0
    found = json.loads(docs("search", "how long do cats sleep", "--json").stdout)
    assert found[0]["document"] == "cats.txt"
