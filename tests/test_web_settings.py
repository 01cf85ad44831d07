"""Settings of the web search: on both sides, with sentences, and never a way into one's own network."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bootstrap import open_web
from paceline.errors import ConfigError, WebError
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import unruled
from paceline.rag.web import SearxngSearch
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings, ServerSettings
from paceline.settings_sources import describe, resolve

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:8080"


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_a_searxng_server_is_searched_within_the_limits_that_are_set(schema: type[NodeSettings]) -> None:
    settings = schema.model_validate({"web_search": URL, "tuning": {"web_results": 2, "web_pages": 5}})
    access = open_web(settings)
    assert access is not None and isinstance(access.provider, SearxngSearch)
    assert (access.limits.results, access.limits.pages) == (2, 5)
    await access.close()
    assert open_web(schema()) is None, "without a provider there is no web"


async def test_the_cloud_s_documents_stand_for_the_web() -> None:
    for settings in (ServerSettings(web_search="store"), AgentSettings(web_search="store", cloud="http://127.0.0.1:1")):
        access = open_web(settings)
        assert access is not None and access.provider is None
        await access.close()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"web_search": "searx.example.org"}, "URL of a SearXNG server"),
        ({"web_search": "ftp://example.org"}, "URL of a SearXNG server"),
        ({"web_search": "http://example.org:99999"}, "URL of a SearXNG server"),
        ({"web_search": "store"}, "set cloud"),
    ],
)
def test_a_provider_that_is_none_is_refused_with_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        resolve(AgentSettings, given, {})


def test_a_password_in_the_url_is_not_shown() -> None:
    settings, origins = resolve(AgentSettings, {"web_search": "https://me:hidden@example.org"}, {})
    assert "hidden" not in repr(settings) and not any("hidden" in line for line in describe(settings, origins))


async def test_no_setting_opens_the_own_network(tmp_path: Path) -> None:
    """Though the server that is searched lies there."""
    access = open_web(ServerSettings(web_search=URL))
    assert access is not None
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        for host in ("127.0.0.1", "localhost", "10.0.0.1", "[::1]", "169.254.169.254"):
            with pytest.raises(WebError, match="not at a public address"):
                await access.read(f"http://{host}/", unruled(store))
    await access.close()
