"""Log files of programs that don't look after them: they grow to a limit, and a few old ones are kept.

The programs hold their files open for appending, so a full file is copied away and emptied in place.
"""

import contextlib
import os
import shutil
from pathlib import Path

LARGEST_LOG = 10_000_000
KEPT_LOGS = 3


def open_log(path: Path) -> int:
    """Open for appending; a link in the file's place is not followed."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def limit_log(path: Path) -> None:
    """Begin anew if the file is too large: its content goes to .1, that of .1 to .2, and so on."""
    with contextlib.suppress(OSError):
        if path.lstat().st_size <= LARGEST_LOG:
            return
        old = [path.with_name(f"{path.name}.{number}") for number in range(1, KEPT_LOGS + 1)]
        for newer, older in zip(old[-2::-1], old[:0:-1], strict=True):
            if newer.exists():
                newer.replace(older)
        old[0].unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk: what can't be kept is dropped, the limit holds
            shutil.copyfile(path, old[0], follow_symlinks=False)
            old[0].chmod(0o600)
        os.truncate(path, 0)
