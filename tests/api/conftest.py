from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.api.real import serving_node
from tests.api.scripted import Script, ScriptedService, answering, client_of, serving

BODY: dict[str, object] = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="session")
def _shared() -> Iterator[tuple[ScriptedService, str, httpx.Client]]:
    service = ScriptedService()
    with serving(service) as url, client_of(url) as client:
        yield service, url, client


@pytest.fixture
def service(_shared: tuple[ScriptedService, str, httpx.Client]) -> Iterator[ScriptedService]:
    """The service behind `url`, fresh for every test."""
    service = _shared[0]
    service.script = Script(answering("Hello", " there", "."))
    service.requests.clear()
    service.forgotten.clear()
    service.debug_options = False
    service.aliases = {}
    service.is_ready = True
    service.refuse_after = None
    yield service


@pytest.fixture
def url(_shared: tuple[ScriptedService, str, httpx.Client], service: ScriptedService) -> str:  # noqa: ARG001  # made fresh
    return _shared[1]


@pytest.fixture
def http(_shared: tuple[ScriptedService, str, httpx.Client], service: ScriptedService) -> httpx.Client:  # noqa: ARG001
    return _shared[2]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own, at the server whose `url` the test has."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def node_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real node, for tests that do not disturb each other."""
    with serving_node(tmp_path_factory.mktemp("store")) as (url, _):
        yield url
