"""Credentials of this device, one per cloud: a JSON file of mode 0600, keyed by the cloud's URL.

A file that others can read is refused, as ssh does with its keys. Replaced atomically.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import ConfigError, other_format
from paceline.runtime.identity import PrivateKey
from paceline.secret_files import private_folder, read_private, write_private
from paceline.wire.messages import KEY_BYTES, MAX_KEYS

FILE = "credentials.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Credential:
    """What this device needs to link to one cloud."""

    device: str  # the name its owner gave it at the server
    server_key: bytes  # pinned when it enrolled
    keys: tuple[PrivateKey, ...] = field(repr=False)  # the present one, and one whose renewal is not confirmed


class Credentials:
    """The file in a state directory. Methods raise ConfigError when only a person can repair it."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def get(self, cloud: str) -> Credential | None:
        """The credential for a cloud."""
        return self._read().get(cloud)

    def put(self, cloud: str, credential: Credential) -> None:
        """Keep a credential."""
        try:
            private_folder(self.path.parent)
            clouds = {url: _to_json(entry) for url, entry in (self._read() | {cloud: credential}).items()}
            write_private(self.path, json.dumps({"format": FORMAT, "clouds": clouds}, indent=2).encode())
        except OSError as error:
            raise ConfigError(f"The credential cannot be kept in {self.path}: {error.strerror}.") from error

    def _read(self) -> dict[str, Credential]:
        content = read_private(self.path, otherwise="have the device revoked and enrol it again")
        if content is None:
            return {}
        try:
            entries = json.loads(content)
            if not isinstance(entries, dict):
                raise ValueError("no object")
            if entries["format"] != FORMAT:
                raise other_format(self.path, entries["format"], FORMAT, "remove the file and enrol the device again")
            return {str(cloud): _from_json(entry) for cloud, entry in entries["clouds"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.path} is damaged: remove it and enrol the device again.") from error


class CloudKeys:
    """This device's keys for one cloud: what the link needs of them, and their renewal (a `KeyStore`)."""

    def __init__(self, credentials: Credentials, cloud: str, credential: Credential) -> None:
        self.credential = credential
        self._credentials = credentials
        self._cloud = cloud

    async def make_key(self) -> PrivateKey:
        present, *unconfirmed = self.credential.keys
        if not unconfirmed:
            await self._keep((present, PrivateKey.generate()))
        return self.credential.keys[-1]

    async def settle(self, public_key: bytes) -> None:
        await self._keep(tuple(key for key in self.credential.keys if key.public_key == public_key))

    async def _keep(self, keys: tuple[PrivateKey, ...]) -> None:
        """Store these keys, twice a day. In a thread the write could outlive its link, and undo a later one."""
        kept = Credential(self.credential.device, self.credential.server_key, keys)
        self._credentials.put(self._cloud, kept)
        self.credential = kept


def _to_json(credential: Credential) -> dict[str, object]:
    return {
        "device": credential.device,
        "server_key": base64.b64encode(credential.server_key).decode(),
        "keys": [base64.b64encode(key.seed).decode() for key in credential.keys],
    }


def _from_json(entry: dict[str, str | list[str]]) -> Credential:
    device, server_key, seeds = entry["device"], entry["server_key"], entry["keys"]
    if not isinstance(device, str) or not isinstance(server_key, str) or not 0 < len(seeds) <= MAX_KEYS:
        raise ValueError("not an entry")
    pinned = base64.b64decode(server_key, validate=True)
    if len(pinned) != KEY_BYTES:
        raise ValueError("not a key")
    return Credential(device, pinned, tuple(PrivateKey(base64.b64decode(seed, validate=True)) for seed in seeds))
