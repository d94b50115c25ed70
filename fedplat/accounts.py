"""Users of this machine: who a kit belongs to, and doing something as that user.

Root never writes, or reads, in a directory that belongs to somebody else: a link that its owner puts there would lead
root's hand anywhere. What has to happen there happens as the owner.
"""

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from fedplat.errors import UsageError


def account_of(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise UsageError(f"no user '{user}' on this machine. Make one with: useradd --system {user}") from None


def owner_of(folder: Path) -> str | None:
    """Whose directory this is, where root works for somebody else; None if it is ours to use as it is."""
    try:
        uid = folder.stat().st_uid
        return None if os.geteuid() != 0 or uid == 0 else pwd.getpwuid(uid).pw_name
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    except KeyError:
        raise UsageError(f"{folder}: belongs to user {uid}, whom this machine doesn't know") from None


@contextlib.contextmanager
def acting_as(user: str | None) -> Iterator[None]:
    """Touch files with the rights of a user, nothing more. `None`: as we are."""
    if user is None:
        yield
        return
    account, group, groups = account_of(user), os.getegid(), os.getgroups()
    os.initgroups(account.pw_name, account.pw_gid)
    try:
        os.setegid(account.pw_gid)
        os.seteuid(account.pw_uid)
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def become(account: pwd.struct_passwd) -> None:
    """Be another user from here on, for good."""
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
