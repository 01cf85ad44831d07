"""`paceline.debug`: forms of strategies for measurements, where the server was started for them."""

from __future__ import annotations

import httpx
import pytest

from lab.baselines.dragon import SHAPES, shaped
from tests.api.generation.test_request import fault, post
from tests.api.scripted import ScriptedService

GELATO = {"waits": True, "overlap": False, "least": 1, "second_guesses": False, "verifier": "truncated", "mass": 0.9}


def test_a_server_that_was_not_started_for_it_refuses_by_name(http: httpx.Client, service: ScriptedService) -> None:
    for debug in ({}, GELATO):
        refused = fault(post(http, paceline={"debug": debug}))
        assert refused["param"] == "paceline.debug" and "--debug-options" in refused["message"]
    assert not service.requests


def test_options_of_strategies_are_chosen_by_their_fields(http: httpx.Client, service: ScriptedService) -> None:
    service.debug_options = True
    assert post(http, paceline={"debug": GELATO}).status_code == 200
    assert post(http, paceline=shaped("sequence", aggregator="paper", rescoring=False)).status_code == 200
    gelato, dragon = (dict(request.strategy.options) for request in service.requests)
    assert gelato == {"search_every": 0} | GELATO
    assert dragon == {"search_every": 0, "drafting": SHAPES["sequence"], "aggregator": "paper", "rescoring": False}


@pytest.mark.parametrize(
    ("param", "debug"),
    [
        ("paceline.debug", 5),
        ("paceline.debug.speed", {"speed": 1}),
        ("paceline.debug.search_every", {"search_every": 16}),
        ("paceline.debug.needs_dists", {"needs_dists": True}),
        ("paceline.debug.writer", {"writer": "cloud"}),
        ("paceline.debug.verifier", {"verifier": "none"}),
        ("paceline.debug.most", {"most": 1000}),
        ("paceline.debug.drafting", {"drafting": {"width": 0}}),
        ("paceline.debug.drafting", {"drafting": {"depth": 1}}),
    ],
)
def test_what_is_no_option_or_no_value_of_one_is_refused(
    http: httpx.Client, service: ScriptedService, param: str, debug: object
) -> None:
    service.debug_options = True
    assert fault(post(http, paceline={"debug": debug}))["param"] == param
    assert not service.requests


@pytest.mark.parametrize(
    "field", [{"aggregator": "coin"}, {"drafts": "chain"}, {"rescoring": False}, {"verifier": "truncated"}]
)
def test_they_are_no_fields_of_their_own(http: httpx.Client, field: dict[str, object]) -> None:
    assert fault(post(http, paceline=field))["param"] == f"paceline.{next(iter(field))}"
