"""`paceline status`: who is linked, what runs, what was sent; and what it says where nothing answers."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import typer
from typer.testing import CliRunner, Result

from client.commands import register
from paceline.api.http.server import listen, url_of
from tests.api.scripted import ScriptedService, client_of, serving


def status(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["status", *arguments])


def test_it_says_who_is_linked_what_runs_and_what_was_sent(url: str) -> None:
    shown = status("--url", url)
    assert shown.exit_code == 0
    assert "linked with laptop, round trip 20 ms; sent 150 bytes (draft 120, target 30)" in shown.stdout
    assert "answers under way 2; 3 steps and 50 rows so far" in shown.stdout
    assert "KV memory: 64 of 160 rows in use" in shown.stdout
    (row,) = json.loads(status("--url", url, "--json").stdout)
    assert row["links"][0]["sent"] == {"draft": 120, "target": 30} and row["url"] == url


def test_watched_it_is_shown_again_with_rates_until_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, None])

    def sleep(_: float) -> None:
        if next(looks, "ended") == "ended":
            raise KeyboardInterrupt

    monkeypatch.setattr("client.commands.time.sleep", sleep)
    shown = status("--url", url, "--watch")
    assert shown.exit_code == 0 and shown.stdout.count("linked with laptop") >= 3
    assert f"{url} now, a second: 0 steps, 0 rows, 0 bytes sent, 0 bytes received" in shown.stdout
    assert status("--url", url, "--watch", "--json").exit_code != 0


def test_readiness_needs_no_key() -> None:
    service = ScriptedService()
    with serving(service, {"right": None}) as url:
        shown = status("--ready", "--url", url)
        assert shown.exit_code == 0 and "ready" in shown.stdout
        service.is_ready = False
        assert status("--ready", "--url", url).exit_code == 1


def test_a_program_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.commands.SILENCE_S", 0.2)
    with closing(listen("127.0.0.1", 0)) as listener:  # takes connections, and never reads
        result = status("--ready", "--url", url_of(listener))
    assert result.exit_code == 1 and "has said nothing for 0.2 s; is it overloaded?" in result.stderr


def test_where_nothing_answers_it_says_so_and_fails() -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    listener.close()
    result = status("--url", url)
    assert result.exit_code == 1 and "Nothing answers" in result.stderr
    (row,) = json.loads(status("--url", url, "--json").stdout)
    assert "Nothing answers" in row["error"]


def test_names_of_devices_need_a_key_where_there_are_keys() -> None:
    """With the scope `devices`, as `tests/api/test_openapi.py` checks of every route that has one."""
    with serving(ScriptedService(), {"right": None}) as url, client_of(url) as http:
        assert http.get("/v1/status").status_code == 401
        assert status("--url", url, "--key", "right").exit_code == 0
        assert "--key" in status("--url", url).stderr
