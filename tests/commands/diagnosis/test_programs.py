"""What `paceline doctor` says of a port: free, held by this side's program, by the other's, or by somebody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.commands import diagnosis
from paceline.commands.diagnosis import program
from paceline.settings import AgentSettings, ServerSettings
from tests.api.scripted import WAIT, ScriptedService, serving


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "ANSWER_S", WAIT)


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_a_free_port_is_fine() -> None:
    status, text = program(ServerSettings(port=0))
    assert status == "ok" and "nothing runs" in text


def test_a_running_program_is_told_with_its_models_and_whether_it_is_linked() -> None:
    service = ScriptedService()
    with serving(service) as url:
        status, text = program(ServerSettings(port=port_of(url)))
        assert status == "ok" and "model scripted, 0 documents, 0 linked" in text
        assert text.endswith("models scripted (loaded), org/second (unloaded)")
        service.is_ready = False
        status, text = program(ServerSettings(port=port_of(url)))
        assert status == "fail" and "cannot be asked now" in text


def test_models_are_not_told_where_they_need_a_key() -> None:
    with serving(ScriptedService(), {"secret": None}) as url:
        status, text = program(ServerSettings(port=port_of(url)))
    assert status == "ok" and "listed for keys alone" in text


def test_the_other_sides_program_on_the_port_is_a_warning() -> None:
    with serving(ScriptedService()) as url:
        status, text = program(AgentSettings(port=port_of(url)))
    assert status == "warn" and "of the cloud" in text and "choose another port" in text


def test_a_port_that_something_else_holds_is_a_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "ANSWER_S", 0.05)  # nobody will answer
    with listening() as port:
        status, text = program(ServerSettings(port=port))
    assert status == "warn" and f"127.0.0.1:{port}" in text and "choose another" in text
