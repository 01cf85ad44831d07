"""`paceline.energy`, and what the report says of joules, in every endpoint that generates text."""

from __future__ import annotations

import httpx

from paceline.core.energy import Energy, EnergyUse
from tests.api.chat.test_output import stream
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault, post
from tests.api.scripted import Script, ScriptedService, TextDelta, done

USE = EnergyUse("rapl", Energy(1.5), Energy(0.5, measured=False))
REPORTED = {
    "device": {
        "meter": "rapl",
        "joules": 2.0,
        "joules_per_token": 1.0,
        "computed": {"joules": 1.5, "source": "measured"},
        "sent": {"joules": 0.5, "source": "modelled"},
    }
}


def test_a_report_has_the_joules_of_the_side_and_their_source(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([TextDelta("Hi", 2), done(energy={"device": USE}, completion_tokens=2)])
    report = {"paceline": {"report": True}}
    assert stream(http, **report)[-1]["paceline"]["energy"] == REPORTED
    asked = {"completions": {"prompt": [1, 2]}, "responses": {"input": "Hi"}, "chat/completions": BODY}
    for path, fields in asked.items():
        answer = http.post(f"/v1/{path}", json={"model": "scripted", **fields, **report})
        assert answer.json()["paceline"]["energy"] == REPORTED


def test_a_budget_reaches_the_strategy(http: httpx.Client, service: ScriptedService) -> None:
    asked = {"joules_per_token": 0.25}
    assert post(http, paceline={"energy": asked}).status_code == 200
    assert post(http, paceline={"energy": {"joules_per_step": 1.2}}).status_code == 200
    assert post(http).status_code == 200
    first, second, none = (dict(request.wish.options) for request in service.requests)
    assert {name: first[name] for name in asked} == asked and second["joules_per_step"] == 1.2
    assert "joules_per_token" not in none


def test_a_budget_that_means_nothing_is_refused(http: httpx.Client, service: ScriptedService) -> None:
    cases: list[tuple[str, object]] = [
        ("paceline.energy", 5),
        ("paceline.energy.joules", {"joules": 1}),
        ("paceline.energy.joules_per_token", {"joules_per_token": -1}),
        ("paceline.energy.joules_per_step", {"joules_per_step": 1e7}),
        ("paceline.energy.objective", {"objective": "renewal"}),
        ("paceline.energy", {"joules_per_token": 1, "joules_per_step": 1}),
    ]
    for param, energy in cases:
        assert fault(post(http, paceline={"energy": energy}))["param"] == param
    assert not service.requests
