"""Enrolment, keys and revocation of devices: storage, lifetimes and validity."""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from device_agent.cloud import _checked, _request, exchange
from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.errors import ConfigError, RequestError, StorageError
from paceline.runtime.identity import PrivateKey, verify
from paceline.wire.close_codes import CloseCode
from paceline.wire.identity import ALPHABET, Claim, EnrolmentRequest, answer_bytes, answer_mac, code_secrets, normalised
from server import devices
from server.app import ENROL as PATH
from server.commands import register
from server.devices import CODE_LIFE_S, MAX_TRIES, EnrolmentAnswer, Registry, Role
from tests.api.generation.test_request import fault
from tests.api.scripted import ScriptedService, request, running
from tests.clocks import read_from

pytestmark = pytest.mark.usefixtures("cheap_codes")


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def file_of(registry: Registry) -> Path:
    return Path(registry._tables.place.name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    read_from(monkeypatch, clock, devices)
    return clock


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Registry:  # noqa: ARG001  # it is read
    return Registry(tmp_path / "state")


SERVER = PrivateKey(bytes([1] * 32))


def asked(code: str, key: PrivateKey | None = None) -> EnrolmentRequest:
    """A device's request with this code, for a new key by default."""
    return _request(code_secrets(code), key or PrivateKey.generate())


def enrol(registry: Registry, code: str, key: PrivateKey | None = None) -> str:
    return registry.enrol(asked(code, key), SERVER).device


def enrolled(registry: Registry, name: str = "phone", role: Role = "device") -> PrivateKey:
    key = PrivateKey.generate()
    assert enrol(registry, registry.add(name, role), key) == name
    return key


def claim(name: str, *keys: PrivateKey) -> Claim:
    return Claim(name, tuple(key.sign(b"said") for key in keys), b"said", verify)


def refused(registry: Registry, request: EnrolmentRequest) -> None:
    with pytest.raises(RequestError) as refusal:
        registry.enrol(request, SERVER)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_enrolment_code")


def wrong(code: str) -> str:
    """The same code with another secret."""
    last = next(letter for letter in ALPHABET if letter != code[-1])
    return code[:-1] + last


def unknown(code: str) -> str:
    """Another code."""
    return ("AAAA" if not code.startswith("AAAA") else "BBBB") + code[4:]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_code_is_readable_and_holds_for_one_key_until_that_is_revoked(registry: Registry) -> None:
    code, key = registry.add("phone"), PrivateKey.generate()
    assert re.fullmatch(r"([2-9A-HJKMNP-Z]{4}-){3}[2-9A-HJKMNP-Z]{4}", code)
    request = asked(code, key)
    answer = registry.enrol(request, SERVER)
    assert (answer.device, registry.enrol(request, SERVER)) == ("phone", answer)  # it may have been lost
    refused(registry, asked(code))
    assert registry.recognise(claim("phone", key)) == key.public_key
    registry.revoke("phone")
    refused(registry, request)


def test_a_code_may_be_typed_in_any_case_with_or_without_dashes(registry: Registry) -> None:
    code = registry.add("phone")
    assert enrol(registry, f" {code.lower().replace('-', ' ')} ") == "phone"
    assert normalised("ab-c d") == "ABCD"


def test_what_cannot_be_a_code_is_told_before_anything_is_sent() -> None:
    for code in ("", "K7QF", "K7QF-2M9X-4TBA-9HJ1", "K7QF-2M9X-4TBA-9HJCC", "K7QF-2M9X-4TBA-9HJé"):
        with pytest.raises(ValueError, match="looks like"):
            code_secrets(code)


def test_a_code_holds_for_ten_minutes(registry: Registry, clock: Clock) -> None:
    in_time, late = registry.add("phone"), registry.add("laptop")
    clock.now += CODE_LIFE_S - 1
    enrol(registry, in_time)
    clock.now += 1
    refused(registry, asked(late))
    assert [device.name for device in registry.devices()] == ["phone"]


def test_a_code_is_void_after_five_wrong_tries_and_not_after_four(registry: Registry) -> None:
    code, other = registry.add("phone"), registry.add("laptop")
    for _ in range(MAX_TRIES):
        refused(registry, asked(wrong(code)))
    refused(registry, asked(code))
    for _ in range(MAX_TRIES - 1):  # another device's code has its own tries
        refused(registry, asked(wrong(other)))
    enrol(registry, other)


def test_wrong_guesses_write_at_most_five_times_and_for_a_known_code_only(registry: Registry) -> None:
    code = registry.add("phone")
    stranger, guess = asked(unknown(code)), asked(wrong(code))
    with registry.watching() as version:
        before = version()
        for _ in range(50):
            refused(registry, stranger)
        assert version() == before
        for _ in range(MAX_TRIES):
            refused(registry, guess)
        void = version()
        for _ in range(50):
            refused(registry, guess)
        assert version() == void != before


def test_a_guess_at_an_unknown_code_takes_no_lock(registry: Registry) -> None:
    guess = asked(unknown(registry.add("phone")))
    with closing(sqlite3.connect(file_of(registry), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused(registry, guess)


@pytest.mark.parametrize("part", ["key", "nonce", "code_signature", "key_signature", "code_id"])
def test_somebody_in_between_can_change_nothing_of_a_request(registry: Registry, part: str) -> None:
    code = registry.add("phone")
    mine = asked(registry.add("laptop"))  # he has a code of his own, too
    changed: dict[str, Any] = {part: getattr(mine, part)}
    refused(registry, replace(asked(code), **changed))
    assert {device.state for device in registry.devices()} == {"waiting"}


@pytest.mark.parametrize("change", ["server_key", "mac", "signature", "device", "all"])
def test_somebody_in_between_cannot_have_his_key_pinned(registry: Registry, change: str) -> None:
    code, key, rogue = registry.add("phone"), PrivateKey.generate(), PrivateKey.generate()
    derived, request = code_secrets(code), asked(code, key)
    answer = registry.enrol(request, SERVER)
    forged = answer_bytes(request, answer.device, rogue.public_key)
    guessed = answer_mac(bytes(32), forged)
    lies: dict[str, dict[str, Any]] = {
        "server_key": {"server_key": rogue.public_key},
        "mac": {"mac": guessed},
        "signature": {"signature": rogue.sign(forged)},
        "device": {"device": "tablet"},
        "all": {"server_key": rogue.public_key, "mac": guessed, "signature": rogue.sign(forged)},
    }
    with pytest.raises(ConfigError, match="somebody is in between"):
        _checked("https://cloud.example", derived, request, key, told(replace(answer, **lies[change])))
    credential = _checked("https://cloud.example", derived, request, key, told(answer))
    assert (credential.device, credential.server_key, credential.keys) == ("phone", SERVER.public_key, (key,))


def told(answer: EnrolmentAnswer) -> dict[str, object]:
    encoded = {name: base64.b64encode(getattr(answer, name)).decode() for name in ("server_key", "mac", "signature")}
    return {"device": answer.device, **encoded}


def test_only_the_own_key_under_the_own_name_is_admitted(registry: Registry) -> None:
    phone, laptop = enrolled(registry, "phone"), enrolled(registry, "laptop")
    for stranger in (claim("phone", laptop), claim("nobody", phone), claim("phone"), claim("", phone)):
        assert registry.recognise(stranger) is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("phone", laptop, phone)) == phone.public_key


def test_a_revoked_device_is_told_so_and_may_be_added_again(registry: Registry) -> None:
    old = enrolled(registry)
    assert registry.revoke("phone")
    assert registry.recognise(claim("phone", old)) is CloseCode.REVOKED
    assert registry.standings({"phone": old.public_key})["phone"][0] is CloseCode.REVOKED
    assert registry.recognise(claim("phone", PrivateKey.generate())) is CloseCode.BAD_CREDENTIAL
    assert [device.state for device in registry.devices()] == ["revoked"]
    new = enrolled(registry)
    assert registry.recognise(claim("phone", old)) is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("phone", new)) == new.public_key


def test_revoking_voids_an_open_code_too(registry: Registry) -> None:
    code = registry.add("phone")
    assert registry.revoke("phone")
    refused(registry, asked(code))
    assert not registry.revoke("phone") and not registry.revoke("nobody")


def test_an_enrolled_device_may_enrol_again_and_its_key_holds_until_then(registry: Registry) -> None:
    old = enrolled(registry)
    code = registry.add("phone")
    assert registry.recognise(claim("phone", old)) == old.public_key
    enrol(registry, code)
    assert registry.recognise(claim("phone", old)) is CloseCode.BAD_CREDENTIAL
    assert registry.standings({"phone": old.public_key})["phone"][0] is CloseCode.BAD_CREDENTIAL


def test_a_second_code_for_a_name_replaces_the_first(registry: Registry) -> None:
    first, second = registry.add("phone"), registry.add("phone")
    refused(registry, asked(first))
    enrol(registry, second)


# ---- renewal and absence --------------------------------------------------------------------------------------------
def test_a_renewed_key_takes_the_place_of_the_former_which_betrays_a_copy(registry: Registry) -> None:
    first, second, third = enrolled(registry), PrivateKey.generate(), PrivateKey.generate()
    assert registry.renew("phone", first.public_key, second.public_key)
    assert not registry.renew("phone", first.public_key, third.public_key)
    assert registry.recognise(claim("phone", second)) == second.public_key
    assert registry.recognise(claim("phone", first)) is CloseCode.KEY_REPLACED
    assert registry.recognise(claim("phone", first, second)) == second.public_key, "a renewal that was interrupted"
    assert registry.standings({"phone": first.public_key})["phone"][0] is None, "the renewal goes over that very link"
    assert registry.renew("phone", second.public_key, third.public_key)
    assert registry.recognise(claim("phone", first)) is CloseCode.BAD_CREDENTIAL
    registry.revoke("phone")
    assert not registry.renew("phone", third.public_key, first.public_key)


@pytest.mark.parametrize(("days", "admitted"), [(1, True), (29.9, True), (30.1, False), (60, False)])
def test_a_device_that_was_away_is_let_in_by_its_key_for_thirty_days(
    registry: Registry, clock: Clock, days: float, admitted: bool
) -> None:
    key = enrolled(registry)
    clock.now += days * 86_400
    assert registry.recognise(claim("phone", key)) == (key.public_key if admitted else CloseCode.AWAY_TOO_LONG)
    assert registry.recognise(claim("phone", PrivateKey.generate())) is CloseCode.BAD_CREDENTIAL
    assert registry.standings({"phone": key.public_key})["phone"][0] is None, "a link that is open stays open"


def test_a_stage_is_let_in_by_its_key_in_that_role_alone_however_long_it_was_away(
    registry: Registry, clock: Clock
) -> None:
    stage, device = enrolled(registry, "rack1", "stage"), enrolled(registry, "phone")
    assert registry.recognise(claim("rack1", stage)) is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("phone", device), "stage") is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("rack1", device), "stage") is CloseCode.BAD_CREDENTIAL
    clock.now += 400 * 86_400
    assert registry.recognise(claim("rack1", stage), "stage") == stage.public_key
    assert registry.revoke("rack1")
    assert registry.recognise(claim("rack1", stage), "stage") is CloseCode.REVOKED


def test_the_owner_may_let_devices_be_away_for_ever(tmp_path: Path, clock: Clock) -> None:
    registry = Registry(tmp_path / "state", away_days=0)
    key = enrolled(registry)
    clock.now += 3650 * 86_400
    assert registry.recognise(claim("phone", key)) == key.public_key


@pytest.mark.parametrize("change", [3600, -3600, -900_000])
def test_a_clock_that_is_set_locks_no_device_out(registry: Registry, clock: Clock, change: float) -> None:
    key, new = enrolled(registry), PrivateKey.generate()
    clock.now += change
    assert registry.recognise(claim("phone", key)) == key.public_key
    assert registry.renew("phone", key.public_key, new.public_key)
    clock.now -= change
    assert registry.recognise(claim("phone", new)) == new.public_key
    assert registry.standings({"phone": new.public_key})["phone"][1] >= 1_000_000


def test_a_name_that_cannot_be_one_is_refused(registry: Registry) -> None:
    for name in ("", "cloud", "a b", "../x", "-x", "x" * 65, "naïve", "a\n"):
        with pytest.raises(ConfigError, match="name"):
            registry.add(name)


def test_nothing_that_lets_anyone_in_is_in_the_file_and_only_its_owner_reads_it(registry: Registry) -> None:
    with registry.watching() as version:  # keeps the log, so that it is read, too
        version()
        key, code = enrolled(registry), registry.add("laptop")
        content = b"".join(file.read_bytes() for file in file_of(registry).parent.iterdir())
    derived = code_secrets(code)
    assert key.public_key in content and derived.mac_key in content
    assert key.seed not in content and derived.seed not in content
    assert code.encode() not in content and normalised(code)[4:].encode() not in content
    assert mode(file_of(registry)) == 0o600 and mode(file_of(registry).parent) == 0o700


def test_a_change_by_another_process_is_seen(registry: Registry) -> None:
    with registry.watching() as version:
        before = version()
        assert version() == before
        Registry(file_of(registry).parent).add("phone")
        assert version() != before


def test_another_registry_in_its_place_is_seen_and_none_is_an_error(registry: Registry, tmp_path: Path) -> None:
    registry.add("phone")
    other = Registry(tmp_path / "other")
    other.add("laptop")
    with registry.watching() as version:
        before = version()
        file_of(other).rename(file_of(registry))
        assert version() != before
        assert [device.name for device in registry.devices()] == ["laptop"]
        file_of(registry).unlink()
        with pytest.raises(StorageError, match="is gone: put it back"):
            version()


def test_a_folder_that_others_may_write_for_a_moment_is_a_fault_of_that_moment(registry: Registry) -> None:
    folder = file_of(registry).parent
    with registry.watching() as version:
        version()
        registry.add("phone")
        folder.chmod(0o777)
        for asked in (version, registry.has_devices, lambda: registry.standings({"phone": b"key"})):
            with pytest.raises(StorageError, match="Others may write"):
                asked()
        folder.chmod(0o700)
        assert version() == 1 and not registry.has_devices()


# ---- over HTTP ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Registry]]:
    """URL of a server that requires API keys, and its registry."""
    from server.app import add_devices
    from server.links import Links
    from tests.server.test_links import Peers
    from tests.wire.identities import CLOUD

    registry = Registry(tmp_path_factory.mktemp("door"))
    live = Links(registry, Peers().on_link, lambda: CLOUD, key=SERVER)
    app = add_devices(create_app(ScriptedService(), keyring=Keyring({"secret": None})), registry, live)
    with running(app) as url:
        yield url, registry


@pytest.mark.anyio
async def test_a_device_enrols_without_an_api_key_and_pins_the_key_of_the_server_that_issued_its_code(
    door: tuple[str, Registry],
) -> None:
    url, registry = door
    credential = await exchange(url, registry.add("watch"))
    assert (credential.device, credential.server_key) == ("watch", SERVER.public_key)
    assert registry.recognise(claim("watch", *credential.keys)) == credential.keys[0].public_key


RIGHT = msgspec.to_builtins(asked("AAAA-BBBB-CCCC-DDDD"))


BAD: list[object] = [
    [],
    RIGHT | {"extra": 1},
    *({name: value for name, value in RIGHT.items() if name != left_out} for left_out in RIGHT),
    *(RIGHT | {name: 5.5} for name in RIGHT),
    *(RIGHT | {"code_id": other} for other in ("AAAAA", "aaaa", "AAAA\n")),
    *(RIGHT | {"key": other} for other in ("AAAA", "é" * 44, None)),
    RIGHT | {"nonce": str(RIGHT["nonce"]) + "A"},
]


def test_a_refused_enrolment_is_told_in_openais_shape(door: tuple[str, Registry]) -> None:
    url, registry = door
    for body in BAD:
        fault(request("POST", url + PATH, json=body))
    for version in (7, "1", None):
        found = fault(request("POST", url + PATH, json={"version": version}))
        assert found["code"] == "version_mismatch" and "the same Paceline release" in found["message"]
    guessed = request("POST", url + PATH, json=msgspec.to_builtins(asked(wrong(registry.add("tablet")))))
    assert fault(guessed, 401)["code"] == "invalid_enrolment_code"


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
    enrol(Registry(tmp_path), code)
    laptop = json.loads(run("add", "laptop", "--json"))
    assert laptop["device"] == "laptop" and enrol(Registry(tmp_path), laptop["code"]) == "laptop"
    assert "enrolled" in run("list")
    assert run("revoke", "phone") == "revoked phone\n"
    states = {row["device"]: row["state"] for row in json.loads(run("list", "--json"))}
    assert states == {"phone": "revoked", "laptop": "enrolled"}
    unknown = runner.invoke(app, ["devices", "revoke", "nobody", "--state-dir", str(tmp_path)])
    assert isinstance(unknown.exception, ConfigError)
