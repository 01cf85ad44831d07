"""Enrolment, credentials and revocation of devices: storage, lifetimes and validity."""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from device_agent.credentials import Credential, Credentials
from paceline.api.http.auth import Keyring
from paceline.errors import ConfigError, RequestError
from server.commands import register
from server.devices import ALPHABET, CODE_LIFE_S, MAX_TRIES, Registry, normalised
from server.enrolment import PATH
from tests.api.generation.test_request import fault
from tests.api.scripted import ScriptedService, request, running


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Registry:
    return Registry(tmp_path / "state", now=clock)


def enrolled(registry: Registry, name: str = "phone") -> str:
    return registry.enrol(registry.add(name))[1]


def refused(registry: Registry, code: str) -> None:
    with pytest.raises(RequestError) as refusal:
        registry.enrol(code)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_enrolment_code")


def wrong(code: str) -> str:
    """The same code with another secret."""
    last = next(letter for letter in ALPHABET if letter != code[-1])
    return code[:-1] + last


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_code_is_readable_and_holds_for_one_use(registry: Registry) -> None:
    code = registry.add("phone")
    assert re.fullmatch(r"([2-9A-HJKMNP-Z]{4}-){3}[2-9A-HJKMNP-Z]{4}", code)
    name, credential = registry.enrol(code)
    assert name == "phone" and len(credential) >= 43  # 256 bits in base64
    assert registry.credential_status("phone", credential) == "admitted"
    refused(registry, code)


def test_a_code_may_be_typed_in_any_case_with_or_without_dashes(registry: Registry) -> None:
    code = registry.add("phone")
    assert registry.enrol(f" {code.lower().replace('-', ' ')} ")[0] == "phone"
    assert normalised("ab-c d") == "ABCD"


def test_a_code_holds_for_ten_minutes(registry: Registry, clock: Clock) -> None:
    in_time, late = registry.add("phone"), registry.add("laptop")
    clock.now += CODE_LIFE_S - 1
    registry.enrol(in_time)
    clock.now += 1
    refused(registry, late)
    assert [device.name for device in registry.devices()] == ["phone"]


def test_a_code_is_void_after_five_wrong_tries(registry: Registry) -> None:
    code, other = registry.add("phone"), registry.add("laptop")
    for _ in range(MAX_TRIES):
        refused(registry, wrong(code))
    refused(registry, code)
    registry.enrol(other)  # another device's code has its own tries


def test_four_wrong_tries_leave_a_code_alone(registry: Registry) -> None:
    code = registry.add("phone")
    for _ in range(MAX_TRIES - 1):
        refused(registry, wrong(code))
    registry.enrol(code)


@settings(max_examples=25, deadline=None)
@given(code=st.text(max_size=80))
def test_no_guess_enrols(code: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / "guesses"
    known = Registry(directory)
    if not known.devices():
        known.add("phone")
    refused(known, code)


def test_of_two_devices_that_race_with_one_code_one_wins(tmp_path: Path) -> None:
    code = Registry(tmp_path).add("phone")
    start = threading.Barrier(8)

    def attempt(_: int) -> str | None:
        registry = Registry(tmp_path)
        start.wait()
        try:
            return registry.enrol(code)[1]
        except RequestError:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [credential for credential in pool.map(attempt, range(8)) if credential is not None]
    assert len(won) == 1
    assert Registry(tmp_path).credential_status("phone", won[0]) == "admitted"


def test_only_the_own_credential_under_the_own_name_is_admitted(registry: Registry) -> None:
    phone, laptop = enrolled(registry, "phone"), enrolled(registry, "laptop")
    assert registry.credential_status("phone", laptop) == registry.credential_status("nobody", phone) == "unknown"
    assert registry.credential_status("phone", "") == registry.credential_status("", "") == "unknown"


def test_a_revoked_device_is_told_so_and_may_be_added_again(registry: Registry) -> None:
    old = enrolled(registry)
    assert registry.revoke("phone")
    assert registry.credential_status("phone", old) == "revoked"
    assert [device.state for device in registry.devices()] == ["revoked"]
    new = enrolled(registry)
    assert registry.credential_status("phone", old) == "unknown"
    assert registry.credential_status("phone", new) == "admitted"


def test_revoking_voids_an_open_code_too(registry: Registry) -> None:
    code = registry.add("phone")
    assert registry.revoke("phone")
    refused(registry, code)
    assert not registry.revoke("phone") and not registry.revoke("nobody")


def test_an_enrolled_device_may_enrol_again_and_its_credential_holds_until_then(registry: Registry) -> None:
    old = enrolled(registry)
    code = registry.add("phone")
    assert registry.credential_status("phone", old) == "admitted"
    registry.enrol(code)
    assert registry.credential_status("phone", old) == "unknown"


def test_a_second_code_for_a_name_replaces_the_first(registry: Registry) -> None:
    first, second = registry.add("phone"), registry.add("phone")
    refused(registry, first)
    registry.enrol(second)


@pytest.mark.parametrize("name", ["", "cloud", "a b", "../x", "-x", "x" * 65, "naïve", "a\n"])
def test_a_name_that_cannot_be_one_is_refused(registry: Registry, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        registry.add(name)


def test_nothing_secret_is_in_the_file_and_only_its_owner_reads_it(registry: Registry) -> None:
    credential, code = enrolled(registry), registry.add("laptop")
    content = registry.path.read_bytes()
    assert credential.encode() not in content
    assert code.encode() not in content and normalised(code)[4:].encode() not in content
    assert mode(registry.path) == 0o600 and mode(registry.path.parent) == 0o700


def test_a_registry_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "devices.sqlite").write_text("this is no database at all, but long enough to be one" * 40)
    for state_dir in (tmp_path / "file", tmp_path):
        with pytest.raises(ConfigError, match="--state-dir"):
            Registry(state_dir)


def test_a_change_by_another_process_is_seen(registry: Registry) -> None:
    with registry.watching() as version:
        before = version()
        assert version() == before
        Registry(registry.path.parent).add("phone")
        assert version() != before


# ---- over HTTP ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry]]:
    """URL of the enrolment route of a server that requires API keys, and its registry."""
    from server.app import create_server
    from server.links import Links
    from tests.server.test_links import WELCOME, Peers

    registry = Registry(tmp_path_factory.mktemp("door"))
    live = Links(registry, Peers(), lambda: WELCOME)
    app = create_server(ScriptedService(), registry, live, keyring=Keyring({"secret": None}))
    with running(app) as url:
        yield url + PATH, registry


def test_a_device_enrols_without_a_key(door: tuple[str, Registry]) -> None:
    url, registry = door
    answer = request("POST", url, json={"code": registry.add("phone"), "name": "My phone"})
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    assert answer.json()["device"] == "phone"
    assert registry.credential_status("phone", answer.json()["credential"]) == "admitted"


def test_a_wrong_code_is_a_401_in_openais_shape(door: tuple[str, Registry]) -> None:
    url, registry = door
    registry.add("tablet")
    assert fault(request("POST", url, json={"code": "AAAA-BBBB-CCCC-DDDD"}), 401)["code"] == "invalid_enrolment_code"


@pytest.mark.parametrize(
    "body",
    [{}, {"code": 5}, {"code": None}, {"code": ""}, {"code": "x" * 65}, {"code": "x", "extra": 1}, [], {"name": 1}],
)
def test_a_bad_enrolment_is_a_400(door: tuple[str, Registry], body: object) -> None:
    fault(request("POST", door[0], json=body))


# ---- at the device --------------------------------------------------------------------------------------------------
def test_credentials_are_kept_by_cloud_in_a_file_of_mode_0600(tmp_path: Path) -> None:
    kept = Credentials(tmp_path / "state")
    assert kept.get("https://a.example") is None
    before = os.umask(0)
    try:
        kept.put("https://a.example", Credential("phone", "one"))
        kept.put("https://b.example", Credential("mobile", "two"))
        kept.put("https://a.example", Credential("phone", "three"))
    finally:
        os.umask(before)
    assert Credentials(tmp_path / "state").get("https://a.example") == Credential("phone", "three")
    assert kept.get("https://b.example") == Credential("mobile", "two")
    assert mode(kept.path) == 0o600 and os.listdir(kept.path.parent) == ["credentials.json"]


@pytest.mark.parametrize("bits", [0o604, 0o640, 0o644, 0o620])
def test_a_credential_file_that_others_can_read_is_refused(tmp_path: Path, bits: int) -> None:
    kept = Credentials(tmp_path)
    kept.put("https://a.example", Credential("phone", "secret"))
    kept.path.chmod(bits)
    with pytest.raises(ConfigError, match="chmod 600"):
        kept.get("https://a.example")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": {}}', '{"a": 5}', "null"])
def test_a_damaged_credential_file_is_a_sentence(tmp_path: Path, content: str) -> None:
    kept = Credentials(tmp_path)
    kept.path.write_text(content)
    kept.path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        kept.get("a")


def test_a_credential_does_not_show_its_secret() -> None:
    assert "secret" not in repr(Credential("phone", "secret"))


# ---- the commands ---------------------------------------------------------------------------------------------------
def test_devices_are_added_listed_and_revoked_at_the_command_line(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(app, ["devices", *arguments, "--state-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    code = run("add", "phone").strip()
    assert json.loads(run("list", "--json"))[0]["state"] == "waiting"
    Registry(tmp_path).enrol(code)
    laptop = json.loads(run("add", "laptop", "--json"))
    assert laptop["device"] == "laptop" and Registry(tmp_path).enrol(laptop["code"])[0] == "laptop"
    assert "enrolled" in run("list")
    assert run("revoke", "phone") == "revoked phone\n"
    states = {row["device"]: row["state"] for row in json.loads(run("list", "--json"))}
    assert states == {"phone": "revoked", "laptop": "enrolled"}
    unknown = runner.invoke(app, ["devices", "revoke", "nobody", "--state-dir", str(tmp_path)])
    assert isinstance(unknown.exception, ConfigError)


def test_codes_do_not_repeat(registry: Registry) -> None:
    codes = [registry.add("phone") for _ in range(10)]
    assert all(first != second for first, second in itertools.combinations(codes, 2))
