"""Durable files: written whole or not at all, whatever the moment of a crash.

The order is the point: write to a hidden name, fsync the file, rename, fsync the directory. The hidden file is always
a new one: a link that somebody has put in its place is replaced, not followed.
"""

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from fedplat.errors import UsageError


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace one file atomically; `mode` holds from its first byte on."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.unlink(missing_ok=True)
        _write_synced(partial, content, 0o666 if mode is None else mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a directory with all its files in one atomic step."""
    partial = path.with_name(f".{path.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for name, content in files.items():
            _write_synced(partial / name, content)
        sync_directory(partial)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    sync_directory(path.parent)


def _write_synced(path: Path, content: bytes, mode: int = 0o666) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def exclusive(path: Path, otherwise: str) -> int:
    """Take a lock for as long as this process lives; its descriptor must be kept."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UsageError(f"{path.parent}: {otherwise}") from None
    return descriptor
