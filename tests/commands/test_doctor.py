"""`paceline doctor`: its checks, and that one failure hides no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.commands import diagnosis
from paceline.commands.main import build
from paceline.commands.options import Found
from paceline.errors import ConfigError
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings
from paceline.settings_sources import resolve

EXPECTED = {
    "python",
    "packages",
    "torch",
    "processor",
    "memory",
    "embedder",
    "demo model",
    "demo cloud model",
    "demo device model",
}


def nodes(**flags: object) -> tuple[NodeSettings, ...]:
    return tuple(resolve(schema, flags, {})[0] for schema in SCHEMAS)


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_whole_installation_passes_and_every_subject_is_reported() -> None:
    result = CliRunner().invoke(build(()), ["doctor", "--json"])
    report = json.loads(result.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert set(found) >= EXPECTED | {
        f"{side} {what}" for side in ("cloud", "device") for what in ("state", "model", "program")
    }
    failed = [check for check in found.values() if check["status"] == "fail"]
    assert (report["ok"], result.exit_code, failed) == (True, 0, [])
    assert "fingerprint" in found["demo cloud model"]["text"]


def test_a_missing_model_fails_with_what_to_do_on_a_line_among_those_of_all_subjects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.CLOUD", tmp_path / "gone")
    result = CliRunner().invoke(build(()), ["doctor"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 1 and len(lines) >= len(EXPECTED)
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    (failed,) = (line for line in lines if line.startswith("fail"))
    assert "demo cloud model" in failed and "install paceline again" in failed


def test_who_may_ask_a_device_is_told() -> None:
    agent = AgentSettings(cloud_may_ask="off")
    assert diagnosis.cloud_may_ask(agent)[0] == "ok"
    for who, word in (("on", "whoever runs the cloud"), ("notebook,phone", "notebook,phone (as set)")):
        status, text = diagnosis.cloud_may_ask(AgentSettings(cloud_may_ask=who))
        assert status == "warn" and word in text and "60 a minute and 1200 an hour" in text
    free = AgentSettings(cloud_may_ask="on", cloud_asks_per_minute=0, cloud_asks_per_hour=0)
    assert diagnosis.cloud_may_ask(free)[1].endswith("as often as it likes")


def test_a_state_directory_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    private, public = tmp_path / "private", tmp_path / "public"
    private.mkdir(mode=0o700)
    public.mkdir()
    public.chmod(0o755)
    assert diagnosis.state_directory(private) == ("ok", f"{private}, mode 700")
    assert diagnosis.state_directory(public)[0] == "warn"
    assert diagnosis.state_directory(tmp_path / "not" / "yet") == ("ok", f"{tmp_path}/not/yet will be made")


def test_what_raises_has_failed_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Found:
        raise ConfigError("no memory at all")

    monkeypatch.setattr(diagnosis, "memory", broken)
    found = {check.name: check for check in diagnosis.run(nodes(), {})}
    assert found["memory"] == diagnosis.Check("memory", "fail", "no memory at all")
    assert "device program" in found


def test_a_program_adds_checks_of_its_own_settings() -> None:
    def of_a_device(settings: NodeSettings) -> Callable[[], Found] | None:
        return partial(tuple, ("warn", settings.side)) if settings.side == "device" else None

    found = [check for check in diagnosis.run(nodes(), {"own": of_a_device}) if check.name == "own"]
    assert found == [diagnosis.Check("own", "warn", "device")]


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "requires", lambda _: ["typer>=99", "nothing-like-it>=1", "pytest; extra == 'test'"])
    status, text = diagnosis.packages()
    assert status == "fail"
    assert "is not >=99" in text
    assert "nothing-like-it>=1 is missing" in text
    assert "pytest" not in text


def test_settings_that_cannot_be_used_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PORT", "eighty")
    result = CliRunner().invoke(build(()), ["doctor"])
    assert isinstance(result.exception, ConfigError)
