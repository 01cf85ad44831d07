"""`paceline tables` from warming up to erasing, on the fake model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.commands.main import build
from paceline.core.drafting.lookup_table import LookupTable
from paceline.engine.loader import load_model
from paceline.errors import ConfigError
from paceline.runtime.lookup_tables import FOLDER, TableStore


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.jsonl").write_text('{"turns": ["hello there"]}\n{"turns": ["hello again"]}\n')
    return tmp_path / "state"


def tables(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build(()), ["tables", *arguments, "--state-dir", str(state)])


def test_a_warmed_table_is_listed_used_and_erased(state: Path) -> None:
    result = tables(state, "warm", "talk.jsonl", "--model", "fake", "--limit", "1")
    assert result.exit_code == 0 and "1 dialogues" in result.stdout, result.output
    tokenizer = load_model("fake").tokenizer
    store = TableStore(state / FOLDER, tokenizer.fingerprint, tokenizer.vocab_size)
    assert len(store.base) > 5
    store.table("phone").record(1, [2], [0.5])
    store.save()
    listed = json.loads(tables(state, "list", "--json").stdout)
    assert [(each["kind"], each["owner"]) for each in listed] == [("base", ""), ("owner", "phone")]
    assert "phone" in tables(state, "list").stdout
    assert json.loads(tables(state, "erase", "phone", "--json").stdout) == {"phone": True}
    again = tables(state, "erase", "phone")
    assert again.exit_code == 1 and "not there  phone" in again.stdout
    assert tables(state, "erase", "--base").stdout.strip() == "erased  (base)"
    assert json.loads(tables(state, "list", "--json").stdout) == []


def test_one_owner_s_table_or_all_are_erased_and_the_base_stays(state: Path) -> None:
    store = TableStore(state / FOLDER, "words", 10)
    for table in (store.base, *map(store.table, ("anna", "ben", ""))):
        assert isinstance(table, LookupTable)
        table.record(1, [2], [0.5])
    assert store.save() == 3 and store.save_base()
    names = {line.split("  ")[0] for line in tables(state, "list").stdout.splitlines()}
    assert names == {"(base)", "(no key)", "anna", "ben"}, "that of requests without a key has a name of its own"
    assert tables(state, "erase", "(base)").exit_code == 1
    assert tables(state, "erase", "(no key)").stdout.strip() == "erased  (no key)"
    assert set(json.loads(tables(state, "erase", "--all", "--json").stdout)) == {"anna", "ben"}
    assert [each["kind"] for each in json.loads(tables(state, "list", "--json").stdout)] == ["base"]


@pytest.mark.parametrize("arguments", [["erase"], ["warm", "nothing.jsonl", "--model", "fake"]])
def test_what_cannot_be_done_is_said(state: Path, arguments: list[str]) -> None:
    result = tables(state, *arguments)
    assert isinstance(result.exception, ConfigError)
