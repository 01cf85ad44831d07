"""Settings of a stranger's endpoint: encrypted, its key never on a command line nor shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from paceline.bootstrap import open_outside
from paceline.commands.diagnosis import outside
from paceline.errors import ConfigError, EndpointError
from paceline.settings import SCHEMAS, AgentSettings, NodeSettings
from paceline.settings_sources import describe, describe_given, resolve

URL, KEY = "https://api.example.com/v1", "sk-1234567890"
GIVEN = {"PACELINE_OUTSIDE_URL": URL, "PACELINE_OUTSIDE_MODEL": "m", "PACELINE_OUTSIDE_KEY": KEY}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_variables_set_it_on_both_sides_and_nothing_shows_the_key(schema: type[NodeSettings]) -> None:
    settings, origins = resolve(schema, {}, GIVEN)
    endpoint = open_outside(settings)
    assert endpoint is not None and endpoint.name == "m at api.example.com"
    shown = [repr(settings), *describe(settings, origins), describe_given(settings, origins)]
    assert not any(KEY in text for text in shown) and any("outside.key" in text for text in shown)
    assert open_outside(schema()) is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"URL": "http://api.example.com/v1"}, "https URL"),
        ({"URL": "http://10.0.0.1/v1"}, "https URL"),
        ({"URL": "https://me:secret@api.example.com"}, "https URL"),
        ({"URL": "https://api.example.com/v1?key=1"}, "https URL"),
        ({"URL": "ftp://127.0.0.1"}, "https URL"),
        ({"MODEL": ""}, "belong together"),
        ({"KEY": "sk-1\nX: y"}, "ASCII"),
        ({"KEY": "sk-schlüssel"}, "ASCII"),
    ],
)
def test_what_would_be_read_on_the_way_or_is_not_whole_is_refused(given: dict[str, str], sentence: str) -> None:
    changed = GIVEN | {f"PACELINE_OUTSIDE_{name}": value for name, value in given.items()}
    with pytest.raises(ConfigError, match=sentence) as refused:
        resolve(AgentSettings, {}, changed)
    assert "secret" not in str(refused.value), "a password of a URL that is refused"


def test_this_machine_may_be_asked_without_encryption() -> None:
    for host in ("127.0.0.1:8080", "localhost", "[::1]:1"):
        assert open_outside(resolve(AgentSettings, {}, GIVEN | {"PACELINE_OUTSIDE_URL": f"http://{host}"})[0])


def test_a_flag_for_the_key_is_refused_and_a_file_that_others_can_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="PACELINE_OUTSIDE_KEY"):
        resolve(AgentSettings, {"outside_key": KEY}, {})
    for table in ("[outside]", "[agent.outside]"):
        file = tmp_path / "paceline.toml"
        file.write_text(f"{table}\nurl = '{URL}'\nmodel = 'm'\nkey = '{KEY}'\n")
        file.chmod(0o644)
        with caplog.at_level(logging.WARNING):
            assert resolve(AgentSettings, {}, {}, file)[0].outside.key == KEY
        assert "has outside.key and can be read by others" in caplog.text
        caplog.clear()


def test_doctor_asks_the_endpoint() -> None:
    settings = resolve(AgentSettings, {}, GIVEN | {"PACELINE_OUTSIDE_URL": "http://127.0.0.1:9/v1"})[0]
    with pytest.raises(EndpointError, match=r"m at 127\.0\.0\.1 cannot be reached"):
        outside(settings)
