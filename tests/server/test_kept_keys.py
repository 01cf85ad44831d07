"""Keys that programs keep: a device's credentials, and the server's own key."""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_agent.cloud import Credential, Credentials
from paceline.errors import ConfigError
from paceline.runtime.identity import PrivateKey
from paceline.wire.identity import code_secrets
from server.program import server_key
from tests.server.test_devices import SERVER, mode


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


def test_a_credential_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    kept = Credentials(tmp_path)
    kept.put("https://a.example", credential())
    for bits in (0o604, 0o640, 0o644, 0o620):
        kept.path.chmod(bits)
        with pytest.raises(ConfigError, match="chmod 600"):
            kept.get("https://a.example")


def test_a_folder_in_which_others_may_replace_keys_is_refused(tmp_path: Path) -> None:
    for bits in (0o702, 0o707, 0o777, 0o722):
        tmp_path.chmod(bits)
        with pytest.raises(ConfigError, match="chmod 700"):
            Credentials(tmp_path).put("https://a.example", credential())
        with pytest.raises(ConfigError, match="chmod 700"):
            server_key(tmp_path)


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Credentials(tmp_path).put("https://a.example", credential())
    assert mode(tmp_path) == 0o700


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
