"""Keeps a party's processes running: starts them, restarts those that die, ends them together.

A child that ends is started again after a pause that grows while it keeps dying, and after everything that it had
forked is gone too. Nothing outlives this process, however it ends (`fedplat.process_groups`). `fedplat site start` and
`fedplat server start` are one of these each.
"""

import contextlib
import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedplat.accounts import account_of as account_of
from fedplat.accounts import become
from fedplat.errors import JobError
from fedplat.log_files import limit_log, open_log
from fedplat.process_groups import Known, Watcher, kill_group, kill_leftovers, wait_until_gone, write_known

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.2, 10.0, 20.0
GRACE_S = 10.0
LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1
_HOPELESS = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP})
"""A program that never ran and can't be started for one of these reasons won't be by waiting."""


@dataclass(frozen=True)
class Program:
    """What to run. `user`: under whose account, None for ours. `folder`: where; never where we happen to be."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    folder: Path = Path("/")


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    group: int | None = None
    """Of its processes, until they are known to be gone."""
    known: Known | None = None
    started: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    start_at: float = 0.0
    restarts: int = 0


class Supervisor:
    """Runs programs until it is told to stop. `pids`: a file that names their processes, for people and tests."""

    def __init__(self, programs: Sequence[Program], pids: Path | None = None) -> None:
        self._children = [_Child(program) for program in programs]
        self._pids = pids
        self._groups = pids.with_name(f"{pids.name}.groups") if pids is not None else None
        self._watcher = Watcher()
        if self._groups is not None:
            kill_leftovers(self._groups)

    def run(self, while_true: Callable[[], bool] = lambda: True) -> None:
        """Keep all programs running; ends them when interrupted or when `while_true` says no."""
        try:
            while while_true():
                self.look()
                time.sleep(LOOK_S)
        finally:
            self.stop()

    def look(self) -> None:
        """Start what is not running."""
        now = time.monotonic()
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._ended(child, now)
            if child.process is None and self._is_gone(child) and now >= child.start_at:
                self._try(child, now)
            limit_log(child.program.log)
        with contextlib.suppress(OSError):
            self._watcher.keep(self._known_groups())

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one program, if it is running."""
        for child in self._children:
            if child.program.name == name and child.process is not None:
                child.process.send_signal(number)

    def stop(self) -> None:
        """End all programs, kindly first. Last started, first ended."""
        running = [child.process for child in reversed(self._children) if child.process is not None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        wait_until_gone(self._known_groups())
        self._watcher.close()
        for path in (self._pids, self._groups):
            if path is not None:
                path.unlink(missing_ok=True)

    def _ended(self, child: _Child, now: float) -> None:
        assert child.process is not None
        code, child.process = child.process.returncode, None
        healthy = now - child.started > HEALTHY_S
        self._pause(child, now, FIRST_PAUSE_S if healthy else min(2 * child.pause_s, LONGEST_PAUSE_S))
        child.restarts += 1
        logger.warning("%s ended (%s); starting it again. Its log: %s", child.program.name, code, child.program.log)

    def _is_gone(self, child: _Child) -> bool:
        """Is nothing left of the one before? What it forked must not go on beside the next one."""
        if child.group is not None and kill_group(child.group):
            self._watcher.remove(child.group)
            child.group = None
        return child.group is None

    def _pause(self, child: _Child, now: float, seconds: float) -> None:
        child.pause_s, child.start_at = seconds, now + seconds

    def _try(self, child: _Child, now: float) -> None:
        try:
            self._start(child, now)
        except (OSError, subprocess.SubprocessError) as error:  # no process, memory or disk left: there will be
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError) and error.errno in _HOPELESS and child.known is None:
                raise JobError(f"{child.program.command[0]}: can't be started: {reason}") from None
            logger.warning("%s can't be started now (%s); trying again", child.program.name, reason)
            self._watcher.set(self._known_groups())  # the child that could not become the program had told of itself
            self._pause(child, now, min(2 * child.pause_s, LONGEST_PAUSE_S))

    def _known_groups(self) -> list[int]:
        return [child.group for child in self._children if child.group is not None]

    def _start(self, child: _Child, now: float) -> None:
        program = child.program
        prepare = self._prepare(program.user)
        self._watcher.keep(self._known_groups())
        program.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open_log(program.log)
        try:
            child.process = subprocess.Popen(
                program.command,
                cwd=program.folder,
                env={**os.environ, **program.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=prepare,
                start_new_session=True,
            )
        finally:
            os.close(log)
        child.group, child.started = child.process.pid, now
        child.known = Known.of(program.name, child.process.pid)
        self._note_pids()

    def _note_pids(self) -> None:
        running = [child.known for child in self._children if child.process is not None and child.known is not None]
        if self._pids is None or self._groups is None:
            return
        try:
            write_known(self._groups, running)
            self._pids.write_text("".join(f"{one.name} {one.pid}\n" for one in running))
        except OSError as error:
            logger.warning("%s: can't be written: %s", self._pids, error.strerror)

    def _prepare(self, user: str | None) -> Callable[[], None]:
        """In the child, before the program: end with the parent, and become another user where one is asked for."""
        account = account_of(user) if user else None
        parent, watcher = os.getpid(), self._watcher
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def prepare() -> None:
            watcher.add(os.getpid())
            if account is not None:
                become(account)
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)

        return prepare
