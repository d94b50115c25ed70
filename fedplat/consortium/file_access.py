"""Could this user read that file? Answered from owners and mode bits, without becoming the user.

The SuperNode takes messages from the network; the site's data, keys and ledger must be out of its user's reach. What
counts is the file and every directory above it: whoever may search all of them and read the file, reads it; whoever may
write one of them, may replace what is below.
"""

import itertools
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from fedplat.errors import UsageError

READ, WRITE, SEARCH = 4, 2, 1


@dataclass(frozen=True)
class Credentials:
    """A user as the kernel sees it."""

    uid: int
    gids: frozenset[int]

    @classmethod
    def of(cls, name: str) -> "Credentials":
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            raise UsageError(f"there is no user '{name}' here. Make it with: useradd --system {name}") from None
        return cls(user.pw_uid, frozenset(os.getgrouplist(name, user.pw_gid)))


def grants(status: os.stat_result, who: Credentials, wanted: int) -> bool:
    """Do owner and mode bits give the user these rights? An owner can give them to itself; of group and others, the
    first that fits counts, as in the kernel."""
    if who.uid in (0, status.st_uid):
        return True
    shift = 3 if status.st_gid in who.gids else 0
    return (stat.S_IMODE(status.st_mode) >> shift) & wanted == wanted


def can_read(path: Path, who: Credentials) -> bool:
    """Could the user read this file? Of a directory: list it, or open what it knows to be in it?"""
    path = path.resolve(strict=True)
    status = path.stat()
    rights = (READ, SEARCH) if stat.S_ISDIR(status.st_mode) else (READ,)
    reachable = all(grants(parent.stat(), who, SEARCH) for parent in path.parents)
    return reachable and any(grants(status, who, right) for right in rights)


def can_replace(path: Path, who: Credentials) -> bool:
    """Could the user write this file, or put another in its place or in that of a directory above it?"""
    path = path.resolve(strict=True)
    down = [*reversed(path.parents), path]
    for parent, child in itertools.pairwise(down):
        status = parent.stat()
        if not grants(status, who, SEARCH):
            return False
        if grants(status, who, WRITE) and not _protected_by_sticky_bit(status, child.stat(), who):
            return True
    return grants(path.stat(), who, WRITE)


def _protected_by_sticky_bit(parent: os.stat_result, child: os.stat_result, who: Credentials) -> bool:
    """As in /tmp: only the owners of the directory and of the file may rename it."""
    return bool(parent.st_mode & stat.S_ISVTX) and who.uid not in (0, parent.st_uid, child.st_uid)


def has_access_list(path: Path) -> bool:
    """A POSIX access list grants what mode bits don't tell."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False
