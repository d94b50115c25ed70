"""What a site keeps of jobs goes when nobody has asked for it for a month."""

import contextlib
import os
import shutil
import time
from pathlib import Path

KEPT_DAYS = 30
DAY_S = 86400.0


class Keeping:
    """The things in a directory that match a pattern, each as old as its last use."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._next = 0.0

    def use(self, path: Path) -> None:
        """Note that a thing is wanted, and once a day remove what is not."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        if time.time() >= self._next:
            self._next = time.time() + DAY_S
            self._forget()

    def _forget(self) -> None:
        oldest = time.time() - KEPT_DAYS * DAY_S
        for path in self._folder.glob(self._pattern):
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mtime >= oldest:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
