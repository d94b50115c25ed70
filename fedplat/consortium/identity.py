"""Ed25519 identities: who signed what.

A signature covers a *purpose* and canonical JSON, so that what was signed as a ledger head can never pass for a job.
Public keys and signatures travel as lower-case hex, private keys lie in PEM files that only their owner can read.
"""

import os
import stat
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedplat import canonical
from fedplat.errors import UsageError


class SigningKey:
    """One party's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> "SigningKey":
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> "SigningKey":
        try:
            require_private(path)
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError:
            raise UsageError(f"{path}: no such key. It is part of the kit that `fedplat provision` made") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: can't be read as a private key: {error}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(f"{path}: not an Ed25519 key")
        return cls(key)

    def save(self, path: Path) -> None:
        write_secret(
            path,
            self._key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def sign(self, purpose: str, value: Any) -> str:
        return self._key.sign(_statement(purpose, value)).hex()


def is_signed(public: str, signature: str, purpose: str, value: Any) -> bool:
    """Did the owner of this public key sign this value for this purpose?"""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _statement(purpose, value))
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(purpose: str, value: Any) -> bytes:
    return f"fedplat/{purpose}/v1\n{canonical.dumps(value)}".encode()


def write_secret(path: Path, content: bytes) -> None:
    """Create a file that nobody else could read at any moment. One that exists is never replaced."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists already; a key is never overwritten. Move it away first") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def require_private(path: Path) -> None:
    """Refuse a secret that others may read."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(f"{path}: others can read this secret (mode {mode:04o}). Do: chmod 600 {path}")
