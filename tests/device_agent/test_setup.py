"""Setting up by four questions, and joining by the line of an invitation. A real enrolment is in tests/e2e."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from device_agent import setup as module
from device_agent.cloud import Credential, Credentials
from device_agent.commands import register
from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.settings import AgentSettings, ServerSettings
from paceline.settings_sources import resolve
from server.commands import register as register_server

LINE = "https://cloud.test#K7QF-2M9X-4TBA-9HJC"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(server, code) of each enrolment; every server knows every code."""
    calls: list[tuple[str, str]] = []

    async def exchange(cloud: str, code: str) -> Credential:
        calls.append((cloud, code))
        if "down" in cloud:
            raise LinkClosed(f"{cloud} does not answer")
        return Credential("laptop", b"k" * 32, (PrivateKey.generate(),))

    monkeypatch.setattr("device_agent.cloud.exchange", exchange)
    return calls


def run(*words: str, input: str = "") -> Result:
    app = typer.Typer()
    register(app)
    register_server(app)
    return CliRunner().invoke(app, list(words), input=input)


def settings(file: str = "paceline.toml") -> AgentSettings:
    return resolve(AgentSettings, {}, {}, Path(file))[0]


def test_a_device_is_set_up_by_four_answers(folder: Path, asked: list[tuple[str, str]]) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "lease.md").write_text("The lease ends in May.")
    done = run("setup", "--config", "own.toml", "--service", input=f"device\nfake\nnotes\npaceline join '{LINE}'\n")
    assert done.exit_code == 0, done.output
    assert asked == [("https://cloud.test", "K7QF-2M9X-4TBA-9HJC")]
    made = settings("own.toml")
    assert (made.model, made.cloud) == (("fake",), "https://cloud.test")
    assert Credentials(made.state_dir).get("https://cloud.test") is not None
    assert "added     lease.md" in done.stdout and "paceline agent --config own.toml" in done.stderr
    unit = (folder / "config/systemd/user/paceline-agent.service").read_text()
    assert f"-m paceline agent --config {folder / 'own.toml'}\n" in unit
    assert Path("own.toml").stat().st_mode & 0o777 == 0o600
    again = run("setup", "--config", "own.toml")
    assert isinstance(again.exception, ConfigError) and "is not written over" in str(again.exception)


def test_a_server_is_set_up_with_the_address_that_its_invitations_name() -> None:
    done = run("setup", input="server\nfake\n\nhttps://cloud.test/below\n")
    assert done.exit_code == 0, done.output
    assert resolve(ServerSettings, {}, {}, Path("paceline.toml"))[0].model == ("fake",)
    told = run("invite", "phone")
    assert told.stdout.startswith("paceline join 'https://cloud.test/below#") and told.stderr == ""
    wrong = run("invite", "phone", "--url", "cloud.test")
    assert "(flag --public-url) cannot be used: give an address such as https://" in str(wrong.exception)
    said = json.loads(run("invite", "phone", "--url", "https://other.test/", "--json").stdout)
    assert said["invitation"].startswith("https://other.test#") and said["device"] == "phone"


def test_an_answer_that_is_none_is_asked_for_again(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "lease.md").write_text("The lease ends in May.")
    done = run("setup", input="cloud\nphone\nServer\nfake\nnots\nnotes\n\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("Error: answer server or device") == 2 and "Error: nots does not exist" in done.stderr
    assert "[server]" in Path("paceline.toml").read_text() and "added     lease.md" in done.stdout


@pytest.mark.parametrize("given", [("--side", "cloud"), ("--folder", "nots"), ("--folder", "nots", "--side", "device")])
def test_what_is_set_up_from_a_wrong_answer_is_nothing(folder: Path, given: tuple[str, ...]) -> None:
    assert run("setup", *given, input="device\nfake\n\n\n").exit_code == 2
    assert list(folder.iterdir()) == []


def test_what_cannot_be_joined_leaves_no_trace(folder: Path, asked: list[tuple[str, str]]) -> None:
    failed = run("setup", input=f"device\nfake\n\n{LINE.replace('cloud', 'down')}\n")
    assert isinstance(failed.exception, LinkClosed) and not Path("paceline.toml").exists()
    insecure = run("join", "http://cloud.test#K7QF-2M9X-4TBA-9HJC")
    assert "would not be encrypted" in str(insecure.exception) and len(asked) == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    ["", " ", "https://cloud.test", "https://cloud.test#", "#K7QF-2M9X-4TBA-9HJC", ",#K7QF-2M9X-4TBA-9HJC", "''"],
)
def test_what_is_no_invitation_is_told_so(folder: Path, asked: list[tuple[str, str]], given: str) -> None:
    joined = run("join", given)
    assert isinstance(joined.exception, ConfigError) and "`paceline invite` printed" in str(joined.exception)
    assert not asked and list(folder.iterdir()) == []


def test_a_server_joined_is_named_in_the_settings_that_are_there(asked: list[tuple[str, str]]) -> None:
    Path("paceline.toml").write_text(
        "log_level = 'error'\n# [agent]\n[server]\nport = 1\n[agent] # here\nport = 2\n[agent.tuning]\nthreads = 1\n"
    )
    assert run("join", "-", input=f"{LINE}\n").exit_code == 0
    made = settings()
    assert (made.cloud, made.port, made.log_level, made.tuning.threads) == ("https://cloud.test", 2, "error", 1)
    before = Path("paceline.toml").read_text()
    assert run("join", LINE).exit_code == 0 and Path("paceline.toml").read_text() == before, "enrolled again"
    other = run("join", "https://other.test#K7QF-2M9X-4TBA-9HJC")
    assert "cloud is https://cloud.test already" in str(other.exception) and len(asked) == 2


def test_a_path_in_a_unit_is_quoted() -> None:
    assert module.unit("cloud", Path("/a b/100%.toml")).count('serve --config "/a b/100%%.toml"\n') == 1
