"""Credentials of this device, one per cloud: a JSON file of mode 0600, keyed by the cloud's URL.

A file that others can read is refused, as ssh does with its keys. Replaced atomically.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

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


_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class _Entry(msgspec.Struct):
    """A credential as it lies in the file; msgspec writes bytes in base64."""

    device: str
    server_key: _Key
    keys: Annotated[list[_Key], msgspec.Meta(min_length=1, max_length=MAX_KEYS)]  # seeds


class _Format(msgspec.Struct):
    format: int | float | str | None


class _File(_Format):
    clouds: dict[str, _Entry]


class Credentials:
    """The file in a state directory. Methods raise ConfigError when only a person can repair it."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def get(self, cloud: str) -> Credential | None:
        entry = self._read().get(cloud)
        if entry is None:
            return None
        return Credential(entry.device, entry.server_key, tuple(map(PrivateKey, entry.keys)))

    def put(self, cloud: str, credential: Credential) -> None:
        entry = _Entry(credential.device, credential.server_key, [key.seed for key in credential.keys])
        try:
            private_folder(self.path.parent)
            content = msgspec.json.encode(_File(FORMAT, self._read() | {cloud: entry}))
            write_private(self.path, msgspec.json.format(content))
        except OSError as error:
            raise ConfigError(f"The credential cannot be kept in {self.path}: {error.strerror}.") from error

    def _read(self) -> dict[str, _Entry]:
        content = read_private(self.path, otherwise="have the device revoked and enrol it again")
        if content is None:
            return {}
        try:
            found = msgspec.json.decode(content, type=_Format).format
            if found != FORMAT:
                raise other_format(self.path, found, FORMAT, "remove the file and enrol the device again")
            return msgspec.json.decode(content, type=_File).clouds
        except msgspec.DecodeError as error:
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
