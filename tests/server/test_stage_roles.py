"""Stages in the registry of devices: enrolled alike, with a role that is theirs alone."""

from __future__ import annotations

from pathlib import Path

from device_agent.enrolment import _request
from paceline.runtime.identity import PrivateKey, verify
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim
from paceline.wire.identity import code_secrets
from server.devices import Registry, Role

DAY_S = 86_400.0


def enrolled(registry: Registry, name: str, role: Role) -> PrivateKey:
    key = PrivateKey.generate()
    answer = registry.enrol(_request(code_secrets(registry.add(name, role)), key), PrivateKey(b"s" * 32))
    assert answer.device == name
    return key


def claim(name: str, key: PrivateKey) -> Claim:
    return Claim(name, (key.sign(b"said"),), b"said", verify)


def test_a_key_opens_what_it_was_enrolled_for_and_nothing_else(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    stage, device = enrolled(registry, "rack1", "stage"), enrolled(registry, "phone", "device")
    assert registry.recognise(claim("rack1", stage), "stage") == stage.public_key
    assert registry.recognise(claim("phone", device)) == device.public_key
    assert registry.recognise(claim("rack1", stage)) is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("phone", device), "stage") is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("rack1", device), "stage") is CloseCode.BAD_CREDENTIAL


def test_a_stage_is_never_away_too_long_and_may_be_revoked(tmp_path: Path) -> None:
    now = [1_000_000.0]
    registry = Registry(tmp_path, away_days=30, now=lambda: now[0])
    key = enrolled(registry, "rack1", "stage")
    now[0] += 400 * DAY_S
    assert registry.recognise(claim("rack1", key), "stage") == key.public_key
    assert registry.revoke("rack1")
    assert registry.recognise(claim("rack1", key), "stage") is CloseCode.REVOKED
