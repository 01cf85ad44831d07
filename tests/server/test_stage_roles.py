"""Stages in the registry of devices: enrolled alike, with a role that is theirs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.runtime.identity import PrivateKey
from paceline.wire.close_codes import CloseCode
from server import devices
from server.devices import Registry, Role
from tests.clocks import read_from
from tests.server.test_devices import Clock, claim, enrol

pytestmark = pytest.mark.usefixtures("cheap_codes")


def enrolled(registry: Registry, name: str, role: Role) -> PrivateKey:
    key = PrivateKey.generate()
    assert enrol(registry, registry.add(name, role), key) == name
    return key


def test_a_key_opens_what_it_was_enrolled_for_and_nothing_else(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    stage, device = enrolled(registry, "rack1", "stage"), enrolled(registry, "phone", "device")
    assert registry.recognise(claim("rack1", stage), "stage") == stage.public_key
    assert registry.recognise(claim("phone", device)) == device.public_key
    assert registry.recognise(claim("rack1", stage)) is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("phone", device), "stage") is CloseCode.BAD_CREDENTIAL
    assert registry.recognise(claim("rack1", device), "stage") is CloseCode.BAD_CREDENTIAL


def test_a_stage_is_never_away_too_long_and_may_be_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    read_from(monkeypatch, clock, devices)
    registry = Registry(tmp_path, away_days=30)
    key = enrolled(registry, "rack1", "stage")
    clock.now += 400 * 86_400
    assert registry.recognise(claim("rack1", key), "stage") == key.public_key
    assert registry.revoke("rack1")
    assert registry.recognise(claim("rack1", key), "stage") is CloseCode.REVOKED
