"""Groups of processes: a program together with everything that it forked, wherever its first process has gone.

A program that is killed leaves its children behind (nginx its workers, which would go on serving with the rules of
yesterday), so programs get a group of their own and end as a group.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fedplat import group_watcher

GONE_S = 5.0
"""How long killed processes may take to be gone."""


@dataclass(frozen=True)
class Known:
    """A program that was started, and by what it is known again: its number alone may be another's by now."""

    name: str
    pid: int
    boot: str
    started: str
    executable: str

    @classmethod
    def of(cls, name: str, pid: int) -> "Known":
        return cls(name, pid, _boot(), (_stat(pid) or [""] * 20)[19], _executable(pid))


class Watcher:
    """The process that ends the groups if this process can't any more."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def keep(self, groups: Iterable[int]) -> None:
        """See to it that a watcher runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", group_watcher.__file__],
            stdin=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        self.set(groups)

    def set(self, groups: Iterable[int]) -> None:
        """These are the groups, and there is no other."""
        self._tell(b"=0\n" + b"".join(b"+%d\n" % group for group in groups))

    def add(self, group: int) -> None:
        """A child calls this of itself, before it becomes another program: it may fork as soon as it has."""
        self._tell(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        self._tell(b"-%d\n" % group)

    def _tell(self, lines: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed: the next look starts another
                os.write(self._process.stdin.fileno(), lines)

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        self._process = None


def kill_group(group: int) -> bool:
    """Kill what is left of a group; says whether nothing is."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    return not members(group)


def wait_until_gone(groups: Iterable[int]) -> None:
    """Kill groups, and wait until nothing of them is left."""
    left, deadline = list(groups), time.monotonic() + GONE_S
    while (left := [group for group in left if not kill_group(group)]) and time.monotonic() < deadline:
        time.sleep(0.01)


def members(group: int) -> list[int]:
    """Processes of a group that are alive. A zombie is dead: it waits for nobody but its parent."""
    if not Path("/proc/self/stat").exists():
        return _exists(group)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            stat = _stat(int(entry.name))
            if stat is not None and stat[2] == str(group) and stat[0] not in "ZX":
                found.append(int(entry.name))
    return found


def _exists(group: int) -> list[int]:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [group]


def write_known(path: Path, known: Iterable[Known]) -> None:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in known), encoding="utf-8")


def kill_leftovers(path: Path) -> None:
    """End what an earlier supervisor noted and left behind, as far as it is certain that it is the same."""
    groups = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                known = Known(**json.loads(line))
                if _is_left(known):
                    groups.append(known.pid)
    wait_until_gone(groups)


def _is_left(known: Known) -> bool:
    """The first process itself; or, if that is gone, processes that carry its group and its program."""
    if known.boot != _boot() or not known.started:
        return False
    first = _stat(known.pid)
    if first is not None:
        return first[19] == known.started and (first[0] in "ZX" or _executable(known.pid) == known.executable)
    left = members(known.pid)
    # A group's number is nobody else's while one of the group is alive; the session says who made the group.
    return bool(left) and all(
        (stat := _stat(pid)) is not None
        and stat[3] == str(known.pid)
        and int(stat[19]) >= int(known.started)
        and _executable(pid) == known.executable
        for pid in left
    )


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: 0 state, 2 group, 3 session, 19 start time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _executable(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
