"""Directories that belong to root, for what root keeps while it runs programs as other users.

What root writes for somebody else lies here and not in that user's own directories, where a link could lead it astray.
systemd makes them (RuntimeDirectory, LogsDirectory); elsewhere they are made here.
"""

import os
import shutil
import stat
from pathlib import Path

from fedplat.accounts import account_of
from fedplat.errors import UsageError

RUN, LOGS = Path("/run/fedplat"), Path("/var/log/fedplat")


def run_folder(name: str) -> Path:
    """A new, empty directory, private to root until it is given to a user."""
    folder = _own(Path(os.environ.get("RUNTIME_DIRECTORY", RUN)), 0o711) / name
    remove(folder)
    folder.mkdir(mode=0o700)
    return folder


def log_folder(name: str) -> Path:
    return _own(_own(Path(os.environ.get("LOGS_DIRECTORY", LOGS)), 0o711) / name, 0o700)


def give(folder: Path, user: str) -> None:
    """Let a directory that only we could write to so far, and the files in it, belong to a user."""
    account = account_of(user)
    for path in (*folder.iterdir(), folder):
        os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)


def remove(folder: Path) -> None:
    """Whoever it belongs to by now; links in it are not followed."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _own(folder: Path, mode: int) -> Path:
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(f"{folder}: must be a directory of root's own. Remove it; it is made anew")
    folder.chmod(mode)
    return folder
