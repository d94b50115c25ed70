"""A lock that a process holds until it ends, however it ends."""

import errno
import fcntl
import os
from pathlib import Path

from fedplat.errors import UsageError


def hold(path: Path, refusal: str) -> int:
    """Take the lock, or refuse in words. Gives the descriptor that holds it; children don't inherit it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        words = refusal if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else error.strerror
        raise UsageError(f"{path.parent}: {words}") from None
    return descriptor
