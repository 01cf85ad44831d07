"""`paceline profile` without measuring: what is stored, and what cannot be done."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.commands.main import build
from paceline.errors import ConfigError
from paceline.runtime.workflows.kept_profiles import FILE, Conditions, ProfileFile, StoredProfiles
from paceline.workflow.activity import Slowdown
from paceline.workflow.profiling import LearningProfiles, OperationProfile, ShapePoint

PROFILE = OperationProfile(
    [ShapePoint(1, 0.01, 3.0), ShapePoint(16, 0.128, 3.5)], Slowdown((3.0, 6.0, 9.0, 12.0), (1.0, 1.25, 1.25, 1.25))
)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    profiles = LearningProfiles({("agent/decode", "engine"): PROFILE, ("chat/decode", "engine"): PROFILE})
    conditions = Conditions("f00dfeed" * 8, "minilm", "a processor, 2 cores, 8 GiB", 2, "4 lanes, cpu", "")
    stored = StoredProfiles(conditions, profiles, "2030-01-01T00:00:00+00:00", ("The machine was [busy].",))
    ProfileFile(tmp_path / "state" / FILE).write(stored.encode())
    return tmp_path / "state"


def profile(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(build(()), ["profile", *arguments, "--state-dir", str(state)])


def test_what_is_stored_is_shown_as_a_table_and_as_json(state: Path) -> None:
    table = profile(state, "--show").stdout
    assert "agent/decode" in table and "chat/decode" in table and "128" in table and "[busy]" in table
    assert "1.25 at 6" in table and "1.25 at 12" in table and "at 9" not in table, (
        "knots between equal ones are left out"
    )
    read = json.loads(profile(state, "--show", "--json").stdout)
    assert read["measured"] == "2030-01-01T00:00:00+00:00"
    assert read["learnt"]["profiles"][0]["points"] == [[1, 0.01, 3.0], [16, 0.128, 3.5]]


def test_what_cannot_be_shown_or_drawn_is_said_before_anything_is_measured(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = profile(state / "elsewhere", "--show")
    assert isinstance(missing.exception, ConfigError) and "without --show first" in str(missing.exception)
    (state / FILE).write_bytes(b"{")
    damaged = profile(state, "--show")
    assert isinstance(damaged.exception, ConfigError) and "damaged" in str(damaged.exception)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (["--show"], ["--model", "fake"]):
        undrawn = profile(state, *arguments, "--plot", "p.png")
        assert isinstance(undrawn.exception, ConfigError) and "paceline[bench]" in str(undrawn.exception)
