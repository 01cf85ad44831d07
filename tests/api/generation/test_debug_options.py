"""`paceline.debug`: forms of strategies for measurements, where the server was started for them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from lab.baselines.dragon import SHAPES, shaped
from lab.published import DSSD, GELATO, PUBLISHED, STATIC, register_published
from paceline.strategies.registry import STRATEGIES
from tests.api.generation.test_request import fault, post
from tests.api.scripted import ScriptedService


def test_a_server_that_was_not_started_for_it_refuses_by_name(http: httpx.Client, service: ScriptedService) -> None:
    for debug in ({}, GELATO):
        refused = fault(post(http, paceline={"debug": debug}))
        assert refused["param"] == "paceline.debug" and "--debug-options" in refused["message"]
    assert not service.requests


def test_options_of_strategies_are_chosen_by_their_fields(http: httpx.Client, service: ScriptedService) -> None:
    service.debug_options = True
    assert post(http, paceline={"debug": GELATO}).status_code == 200
    assert post(http, paceline=shaped("sequence", aggregator="paper", rescoring=False)).status_code == 200
    gelato, dragon = (dict(request.wish.options) for request in service.requests)
    assert gelato == {"search_every": 0} | GELATO
    assert dragon == {"search_every": 0, "drafting": SHAPES["sequence"], "aggregator": "paper", "rescoring": False}


def test_what_is_no_option_or_no_value_of_one_is_refused(http: httpx.Client, service: ScriptedService) -> None:
    service.debug_options = True
    cases: list[tuple[str, object]] = [
        ("paceline.debug", 5),
        ("paceline.debug.speed", {"speed": 1}),
        ("paceline.debug.search_every", {"search_every": 16}),
        ("paceline.debug.needs_dists", {"needs_dists": True}),
        ("paceline.debug.writer", {"writer": "cloud"}),
        ("paceline.debug.verifier", {"verifier": "none"}),
        ("paceline.debug.most", {"most": 1000}),
        ("paceline.debug.drafting.width", {"drafting": {"width": 0}}),
        ("paceline.debug.drafting.depth", {"drafting": {"depth": 1}}),
        ("paceline.debug.drafting", {"drafting": 4}),
    ]
    for param, debug in cases:
        assert fault(post(http, paceline={"debug": debug}))["param"] == param
    assert fault(post(http, paceline={"aggregator": "coin"}))["param"] == "paceline.aggregator", "no field of its own"
    assert not service.requests


@pytest.fixture
def published() -> Iterator[None]:
    register_published()
    yield
    for strategy in PUBLISHED:
        del STRATEGIES[strategy.name]


@pytest.mark.usefixtures("published")
def test_a_request_names_one_with_options_of_its_own(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "strategies", lambda: tuple(STRATEGIES))
    service.debug_options = True
    cases: list[tuple[str, dict[str, object]]] = [
        ("diaa", {"interval": 4, "threshold": 0.01}),
        ("dragon", {"gamma": 0.25, "keep_at": "cloud", "drafting": {"width": 1, "rows": 1}}),
        *(("draft_verify", debug) for debug in (GELATO, STATIC, DSSD)),
        ("flowspec-pipedec", {"drafting": {"rows": 8}}),
    ]
    for name, debug in cases:
        assert post(http, paceline={"strategy": name, "debug": debug}).status_code == 200
        asked = service.requests[-1].wish
        assert asked.strategy == name and asked.options.keys() >= debug.keys()
    for name, debug, field in (("diaa", {"gamma": 0.5}, "gamma"), ("dragon", {"gamma": 2}, "gamma")):
        refused = fault(post(http, paceline={"strategy": name, "debug": debug}))
        assert refused["param"] == f"paceline.debug.{field}"
