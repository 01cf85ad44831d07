"""Credentials of this device, one per cloud: a JSON file of mode 0600, keyed by the cloud's URL.

A file that others can read is refused, as ssh does with its keys. Replaced atomically.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

FILE = "credentials.json"


@dataclass(frozen=True, slots=True)
class Credential:
    device: str  # the name its owner gave it at the server
    secret: str

    def __repr__(self) -> str:
        return f"Credential({self.device!r})"  # the secret must not get into a log


class Credentials:
    """The file in a state directory. Methods raise ConfigError when only a person can repair it."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def get(self, cloud: str) -> Credential | None:
        found = self._read().get(cloud)
        return None if found is None else Credential(found["device"], found["credential"])

    def put(self, cloud: str, credential: Credential) -> None:
        entries = self._read() | {cloud: {"device": credential.device, "credential": credential.secret}}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(json.dumps(entries, indent=2).encode())
        except OSError as error:
            raise ConfigError(f"The credential cannot be kept in {self.path}: {error.strerror}.") from error

    def _replace(self, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            with self.path.open("rb") as stream:
                mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
                content = stream.read()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}.") from error
        if mode & 0o077:
            raise ConfigError(
                f"{self.path} can be read by others (mode {mode:04o}): run `chmod 600 {self.path}`, and enrol the "
                "device again if somebody may have read it."
            )
        return _checked(content, self.path)


def _checked(content: bytes, path: Path) -> dict[str, dict[str, str]]:
    try:
        entries = json.loads(content)
        return {
            str(cloud): {"device": str(entry["device"]), "credential": str(entry["credential"])}
            for cloud, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: remove it and enrol the device again.") from error
