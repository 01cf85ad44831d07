"""The server's key, which its devices pin when they enrol: one file in the state directory, made at the first start."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from paceline.errors import ConfigError
from paceline.runtime.identity import PrivateKey
from paceline.secret_files import private_folder, read_private, write_private

FILE = "server-key.pem"  # PKCS #8


def server_key(state_dir: Path) -> PrivateKey:
    """Read the server's key, making it if there is none. Raises ConfigError for one that cannot be used."""
    file = state_dir / FILE
    otherwise = "remove it, so that a new one is made, and enrol all devices again"
    try:
        private_folder(state_dir)
        content = read_private(file, otherwise=otherwise)
        if content is None:
            write_private(file, _pem(PrivateKey.generate()), replace=False)  # another process may have been first
            content = read_private(file, otherwise=otherwise) or b""
    except OSError as error:
        raise ConfigError(f"The server's key cannot be kept in {file}: {error.strerror}. Check --state-dir.") from error
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(_damaged(file)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(_damaged(file))
    return PrivateKey(key.private_bytes_raw())


def _pem(key: PrivateKey) -> bytes:
    private = Ed25519PrivateKey.from_private_bytes(key.seed)
    return private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _damaged(file: Path) -> str:
    return (
        f"{file} is not an Ed25519 key: restore it from a copy, or remove it, so that a new one is made, and enrol all "
        "devices again."
    )
