"""Keys of clients, and keys that a device and a server keep of each other."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from device_agent.cloud import Credential, Credentials
from paceline.api.app import create_app
from paceline.api.http import auth
from paceline.api.http.auth import Identity, Keyring, check_exposure
from paceline.commands.main import build
from paceline.errors import ConfigError, StorageError
from paceline.runtime.asking import FILE as ASKING
from paceline.runtime.identity import PrivateKey
from paceline.wire.identity import code_secrets
from server import keys as keys_module
from server.commands import register
from server.keys import DAY_S, MARK, REQUIRED, SHOWN, Keys
from server.program import FILE as SERVER_KEY
from server.program import server_key
from server.state import WatchedRows
from tests.api.conftest import BODY
from tests.api.generation.test_request import fault
from tests.api.scripted import WAIT, ScriptedService, request, running
from tests.clocks import read_from
from tests.server.test_devices import SERVER, Clock, mode

CHAT = "/v1/chat/completions"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    read_from(monkeypatch, clock, keys_module, auth)
    return clock


@pytest.fixture
def keys(tmp_path: Path, clock: Clock) -> Keys:  # noqa: ARG001  # it is read
    return Keys(tmp_path / "state")


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_is_known_by_its_hash_with_what_it_may_do(keys: Keys) -> None:
    phone = keys.create("phone app", scopes=["files", "chat"], device="phone")
    everything = keys.create("all")
    with keys.current() as stored:
        ring = Keyring({"configured": None}, stored)
        found = [ring.identify(bearer(key)) for key in (phone, everything, "configured")]
        assert [each and (each.device, each.scopes) for each in found] == [
            ("phone", frozenset({"chat", "files"})),
            (None, None),
            (None, None),
        ]
        assert len({each and each.key for each in found}) == 3, "what one made, another does not find"
        for wrong in (phone[:-1], phone + "x", phone[:SHOWN], "", "phone app"):
            assert ring.identify(bearer(wrong)) is None
        assert ring.identify(phone) is None and ring.identify(f"Basic {phone}") is None


def test_no_key_is_in_the_file_and_others_cannot_read_it(keys: Keys, tmp_path: Path) -> None:
    made = [keys.create(f"key {i}") for i in range(3)]
    assert len(set(made)) == 3 and all(key.startswith(MARK) and len(key) >= len(MARK) + 43 for key in made)
    for file in (tmp_path / "state").iterdir():
        for key in made:
            assert key.encode() not in file.read_bytes() and key[SHOWN:].encode() not in file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.prefix for each in keys.all()] == [key[:SHOWN] for key in made]


def test_a_key_expires(keys: Keys, clock: Clock) -> None:
    key = keys.create("short", days=2)
    with keys.current() as stored:
        ring = Keyring({}, stored)
        clock.now += 2 * DAY_S - 1
        assert ring.identify(bearer(key)) is not None and keys.all()[0].state == "valid"
        clock.now += 1
        assert ring.identify(bearer(key)) is None and keys.all()[0].state == "expired"
        assert not ring.holds()
        assert ring.expired(bearer(key)) == clock.now and ring.expired(bearer("another")) is None
        (dead,) = stored()
        assert keys.extend("short", 1) and keys.all()[0].state == "valid"
        assert ring.identify(bearer(key)) == dead.identity, "what it made is its own"
        clock.now += DAY_S
        assert ring.identify(bearer(key)) is None
        assert keys.extend(key[:SHOWN], None) and ring.identify(bearer(key)) == dead.identity
        assert keys.revoke("short") and not keys.extend("short", 1) and ring.expired(bearer(key)) is None
        with pytest.raises(ConfigError, match="cannot expire after 0 days"):
            keys.extend("short", 0)


def test_a_rotated_key_has_another_secret_and_what_it_made(keys: Keys) -> None:
    with keys.current() as stored:
        ring = Keyring({}, stored)
        first = keys.create("app", scopes=["chat"], device="phone")
        known = ring.identify(bearer(first))
        second = keys.rotate("app")
        assert second is not None and ring.identify(bearer(second)) == known and ring.identify(bearer(first)) is None
        assert [(each.name, each.prefix) for each in keys.all()] == [("app", second[:SHOWN])]
        keys.revoke("app")
        other = keys.create("app")
        keys.revoke("app")
        again = keys.rotate(second[:SHOWN])
        assert again is not None and ring.identify(bearer(again)) == known
        newest = keys.rotate("app")
        assert newest is not None and ring.identify(bearer(newest)) == known, "the one in force is rotated"
        assert all(ring.identify(bearer(each)) is None for each in (first, second, again, other))
        with pytest.raises(ConfigError, match="Another key has its name"):
            keys.rotate(other[:SHOWN])
        assert keys.rotate("nobody") is None


def test_the_last_key_revoked_opens_nothing(keys: Keys) -> None:
    with keys.current() as stored:
        ring = Keyring({}, stored)
        assert not ring.required and ring.identify(None) == Identity()
        key = keys.create("only")
        assert ring.required and ring.identify(None) is None and ring.identify(bearer(key)) is not None
        assert keys.revoke("only") and not keys.revoke("only")
        assert ring.required and ring.identify(bearer(key)) is None and ring.identify(None) is None
        assert not ring.holds()


def test_a_revoked_key_does_not_hold_again_when_the_clock_goes_back(keys: Keys, clock: Clock) -> None:
    key = keys.create("gone", days=3)
    keys.revoke("gone")
    clock.now -= DAY_S
    with keys.current() as stored:
        ring = Keyring({}, stored)
        assert ring.identify(bearer(key)) is None and not ring.holds()


def test_stored_keys_count_where_others_can_reach(keys: Keys, clock: Clock) -> None:
    with keys.current() as stored:
        ring = Keyring({}, stored)
        with pytest.raises(ConfigError, match="paceline keys create"):
            check_exposure("0.0.0.0", ring)
        keys.create("one", days=1)
        check_exposure("0.0.0.0", ring)
        clock.now += DAY_S
        with pytest.raises(ConfigError):
            check_exposure("0.0.0.0", ring)


def test_a_name_is_taken_until_its_key_is_revoked(keys: Keys) -> None:
    first = keys.create("ci")
    with pytest.raises(ConfigError, match="revoke it first"):
        keys.create("ci")
    assert keys.revoke(first[:SHOWN])  # a prefix identifies it too
    second = keys.create("ci")
    assert first != second
    assert [each.state for each in keys.all()] == ["revoked", "valid"]
    assert not keys.revoke("nobody")


def test_what_cannot_be_a_key_is_a_sentence(keys: Keys) -> None:
    for name in ("", "x" * 65, "a\nb"):
        with pytest.raises(ConfigError):
            keys.create(name)
    wrong = ({"scopes": ["chats"]}, {"device": "no such name"}, {"days": 0}, {"days": float("nan")})
    for arguments in wrong:
        with pytest.raises(ConfigError):
            keys.create("a", **arguments)  # type: ignore[arg-type]  # wrong on purpose
    assert not keys.all()


@pytest.mark.parametrize("lost", ["empty", "missing", "without a key"])
def test_a_lost_file_of_keys_does_not_open_a_server(tmp_path: Path, lost: str) -> None:
    keys = Keys(tmp_path)
    with keys.current() as stored:
        assert stored() == (), "one that has never had a key needs none"
    keys.create("app")
    for file in tmp_path.glob("keys.sqlite*"):
        file.unlink()
    if lost != "missing":
        (tmp_path / "keys.sqlite").touch(mode=0o600)
    if lost == "without a key":
        Keys(tmp_path)
    with pytest.raises(ConfigError, match=r"keys\.sqlite has no keys, though there have been some"):
        build()(["serve", "--model", "fake", "--port", "0", "--state-dir", str(tmp_path)], standalone_mode=False)
    Keys(tmp_path).create("new")
    with Keys(tmp_path).current() as stored:
        assert len(stored()) == 1


def test_keys_that_came_without_their_mark_are_required_from_the_first_start_on(tmp_path: Path) -> None:
    Keys(tmp_path).create("app")
    (tmp_path / REQUIRED).unlink()
    with Keys(tmp_path).current():
        pass
    (tmp_path / "keys.sqlite").unlink()
    with pytest.raises(ConfigError, match="there have been some"), Keys(tmp_path).current():
        pass


def test_a_file_exchanged_beside_a_running_server_is_in_force_from_the_next_request_on(tmp_path: Path) -> None:
    (copies := tmp_path / "copies").mkdir()
    restored, revoked = Keys(copies).create("restored"), Keys(copies).create("revoked later")
    (state := tmp_path / "state").mkdir()
    keys = Keys(state)
    with keys.current() as stored, running(create_app(ScriptedService(), keyring=Keyring({}, stored))) as url:

        def status(key: str) -> int:
            return request("POST", url + CHAT, json=BODY, headers={"authorization": f"Bearer {key}"}).status_code

        old = keys.create("old")  # still in the write-ahead log
        assert (status(old), status(restored)) == (200, 401)
        (copies / "keys.sqlite").rename(state / "keys.sqlite")
        assert (status(old), status(restored), status(revoked)) == (401, 200, 200)
        Keys(state).revoke("revoked later")
        assert (status(restored), status(revoked)) == (200, 401)


@pytest.mark.parametrize("place", ["missing", "empty", "another kind of file"])
def test_the_door_is_closed_while_the_file_cannot_be_read(tmp_path: Path, place: str) -> None:
    keys = Keys(tmp_path)
    key = keys.create("app")
    headers = {"authorization": f"Bearer {key}"}
    with keys.current() as stored, running(create_app(ScriptedService(), keyring=Keyring({}, stored))) as url:
        assert request("POST", url + CHAT, json=BODY, headers=headers).status_code == 200
        kept = tmp_path / "kept"
        (tmp_path / "keys.sqlite").rename(kept)
        if place != "missing":
            new = tmp_path / "new"
            new.write_bytes(b"" if place == "empty" else b"no database, but long enough to be mistaken for one" * 90)
            new.rename(tmp_path / "keys.sqlite")
        for sent in (headers, {}):
            assert fault(request("POST", url + CHAT, json=BODY, headers=sent), 503)["code"] == "storage_unusable"
        kept.rename(tmp_path / "keys.sqlite")
        assert request("POST", url + CHAT, json=BODY, headers=headers).status_code == 200
        assert request("POST", url + CHAT, json=BODY).status_code == 401


@pytest.mark.anyio
async def test_the_event_loop_goes_on_while_changed_tables_are_read_once_for_all_who_wait() -> None:
    version, reads = 1, 0
    begun, going = threading.Event(), threading.Event()

    def read() -> int:
        nonlocal reads
        reads += 1
        begun.set()
        assert going.wait(WAIT), "the event loop stands still"
        if version == 3:
            raise StorageError("the database is away", away=True)
        return reads

    watched = WatchedRows(lambda: version, read)
    asking = [asyncio.create_task(watched.fresh()) for _ in range(3)]
    while not begun.is_set():
        await asyncio.sleep(0)
    asking.pop().cancel()  # a client that leaves
    version = 2  # while it is read: what is found may be older
    going.set()
    assert await asyncio.gather(*asking) == [2, 2] and await watched.fresh() == watched() == 2
    version = 3
    failed = await asyncio.gather(watched.fresh(), watched.fresh(), return_exceptions=True)
    assert [type(each) for each in failed] == [StorageError] * 2 and reads == 3
    version = 4
    assert await watched.fresh() == 4, "it is read again when the database is back"


# ---- the command beside a running server ----------------------------------------------------------------------------
def command(state_dir: Path, *arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, ["keys", *arguments, "--state-dir", str(state_dir)])


def test_the_commands_and_a_running_server(tmp_path: Path) -> None:
    service = ScriptedService()
    keys = Keys(tmp_path)
    with keys.current() as stored, running(create_app(service, keyring=Keyring({}, stored))) as url:
        assert request("POST", url + CHAT, json=BODY).status_code == 200  # no key exists yet
        made = command(tmp_path, "create", "app", "--scope", "chat", "--device", "phone", "--expires", "9")
        key = made.stdout.strip()
        assert "not shown again" in made.stderr
        headers = {"authorization": f"Bearer {key}"}
        assert fault(request("POST", url + CHAT, json=BODY), 401)["code"] == "invalid_api_key"
        assert request("POST", url + CHAT, json=BODY, headers=headers).status_code == 200
        assert service.requests[-1].joining.device == "phone"

        embedder = json.loads(command(tmp_path, "create", "embedder", "--scope", "embeddings", "--json").stdout)["key"]
        refusal = request("POST", url + CHAT, content=b"", headers={"authorization": f"Bearer {embedder}"})
        told = fault(refusal, 403)
        assert told["code"] == "insufficient_scope"
        assert "`paceline keys create NAME --scope chat`" in str(told["message"])
        assert 'scope="chat"' in refusal.headers["www-authenticate"]
        assert request("GET", url + "/v1/models", headers={"authorization": f"Bearer {embedder}"}).status_code == 200

        brief = command(tmp_path, "create", "brief", "--expires", "1e-9").stdout.strip()
        told = fault(request("POST", url + CHAT, json=BODY, headers={"authorization": f"Bearer {brief}"}), 401)
        assert "expired on 20" in str(told["message"]) and told["code"] == "invalid_api_key"
        assert "extended brief" in command(tmp_path, "extend", "brief", "--expires", "9").stdout
        assert request("POST", url + CHAT, json=BODY, headers={"authorization": f"Bearer {brief}"}).status_code == 200

        key = command(tmp_path, "rotate", "app").stdout.strip()
        assert fault(request("POST", url + CHAT, json=BODY, headers=headers), 401)["code"] == "invalid_api_key"
        headers = {"authorization": f"Bearer {key}"}
        assert request("POST", url + CHAT, json=BODY, headers=headers).status_code == 200
        assert "revoked app" in command(tmp_path, "revoke", "app").stdout
        assert fault(request("POST", url + CHAT, json=BODY, headers=headers), 401)["code"] == "invalid_api_key"
    listed = command(tmp_path, "list")
    assert key[:SHOWN] in listed.stdout and "device phone" in listed.stdout and "scopes embeddings" in listed.stdout
    assert key not in listed.stdout
    assert [row["state"] for row in json.loads(command(tmp_path, "list", "--json").stdout)] == [
        "revoked",
        "valid",
        "valid",
    ]
    for asked in ("revoke", "extend"):
        assert isinstance(command(tmp_path, asked, "app").exception, ConfigError)
    assert isinstance(command(tmp_path, "rotate", "nobody").exception, ConfigError)
    (tmp_path / ASKING).touch()
    assert "an agent's state directory" in str(command(tmp_path, "create", "app").exception)
    (tmp_path / SERVER_KEY).touch()
    assert command(tmp_path, "list").exception is None


# ---- at the device --------------------------------------------------------------------------------------------------
def credential(device: str = "phone", keys: int = 1) -> Credential:
    return Credential(device, SERVER.public_key, tuple(PrivateKey.generate() for _ in range(keys)))


def seen(found: Credential | None) -> tuple[str, bytes, list[bytes]]:
    assert found is not None
    return found.device, found.server_key, [key.seed for key in found.keys]


def test_credentials_are_kept_by_cloud_in_a_file_of_mode_0600(tmp_path: Path) -> None:
    kept = Credentials(tmp_path / "new" / "state")
    assert kept.get("https://a.example") is None
    first, second, third = credential("phone"), credential("mobile", 2), credential("phone")
    before = os.umask(0)
    try:
        kept.put("https://a.example", first)
        kept.put("https://b.example", second)
        kept.put("https://a.example", third)
    finally:
        os.umask(before)
    assert seen(Credentials(tmp_path / "new" / "state").get("https://a.example")) == seen(third)
    assert seen(kept.get("https://b.example")) == seen(second)
    assert mode(kept.path) == 0o600 and os.listdir(kept.path.parent) == ["credentials.json"]
    assert mode(tmp_path / "new") == mode(tmp_path / "new" / "state") == 0o700


def test_credentials_that_others_can_read_or_replace_are_refused(tmp_path: Path) -> None:
    kept = Credentials(tmp_path)
    kept.put("https://a.example", credential())
    for bits in (0o604, 0o640, 0o620):
        kept.path.chmod(bits)
        with pytest.raises(ConfigError, match="chmod 600"):
            kept.get("https://a.example")
    for bits in (0o702, 0o722):
        tmp_path.chmod(bits)
        for use in (lambda: kept.put("https://a.example", credential()), lambda: server_key(tmp_path)):
            with pytest.raises(ConfigError, match="chmod 700"):
                use()


SOME_KEY = base64.b64encode(bytes(32)).decode()
ENTRY = {"device": "phone", "server_key": SOME_KEY, "keys": [SOME_KEY]}
FAULTS: list[dict[str, object]] = [
    {"device": 5},
    {"server_key": "AAAA"},
    {"server_key": "!"},
    {"keys": []},
    {"keys": ["AAAA"]},
    {"keys": [SOME_KEY] * 3},
    {"keys": 5},
]


def test_a_damaged_credential_file_is_a_sentence(tmp_path: Path) -> None:
    kept = Credentials(tmp_path)
    kept.path.touch(mode=0o600)
    for content in (
        *("", "[]", "{", "null", '{"a": {}}', '{"format": 1, "clouds": 5}', '{"format": 1}'),
        *(json.dumps({"format": 1, "clouds": {"a": ENTRY | change}}) for change in FAULTS),
    ):
        kept.path.write_text(content)
        with pytest.raises(ConfigError, match="is damaged: remove it"):
            kept.get("a")


def test_a_credential_file_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    kept = Credentials(tmp_path)
    kept.path.touch(mode=0o600)
    for content in ('{"format": 2, "clouds": {}}', '{"format": "1"}'):
        kept.path.write_text(content)
        with pytest.raises(ConfigError, match=r"credentials\.json was written by another version .* enrol"):
            kept.get("https://a.example")
        with pytest.raises(ConfigError, match="another version"):
            kept.put("https://a.example", credential())
        assert kept.path.read_text() == content


def test_a_credential_does_not_show_its_secret() -> None:
    shown = credential()
    assert "keys" not in repr(shown) and shown.keys[0].seed.hex() not in repr(shown.keys[0])
    assert "seed" not in repr(code_secrets("AAAA-BBBB-CCCC-DDDD"))


# ---- the server's key -----------------------------------------------------------------------------------------------
def test_a_server_keeps_one_key_in_a_private_file(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = {key.seed for key in pool.map(lambda _: server_key(tmp_path / "state"), range(8))}
    assert made == {server_key(tmp_path / "state").seed}
    assert mode(tmp_path / "state" / "server-key.pem") == 0o600
    assert os.listdir(tmp_path / "state") == ["server-key.pem"]


def test_a_server_key_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "server-key.pem"
    file.touch(mode=0o600)
    for content in (b"", b"-----BEGIN PRIVATE KEY-----", b"nonsense"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="restore it from a copy"):
            server_key(tmp_path)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        server_key(tmp_path)
