"""Keeps a party's processes running: starts them, restarts those that die, ends them together.

A child that ends is started again after a pause that grows while it keeps dying. Children can't outlive this process,
however it ends. `fedplat site start` and `fedplat server start` are one of these each.
"""

import contextlib
import ctypes
import logging
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedplat.errors import JobError, UsageError

logger = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 0.2, 10.0, 20.0
GRACE_S = 10.0
LOOK_S = 0.1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Program:
    """What to run. `user`: under whose account, None for ours."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    folder: Path | None = None


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    start_at: float = 0.0
    restarts: int = 0


class Supervisor:
    """Runs programs until it is told to stop."""

    def __init__(self, programs: Sequence[Program], pids: Path | None = None) -> None:
        self._children = [_Child(program) for program in programs]
        self._pids = pids

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
            if child.process is None and now >= child.start_at:
                self._start(child, now)

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
        if self._pids is not None:
            self._pids.unlink(missing_ok=True)

    def _ended(self, child: _Child, now: float) -> None:
        assert child.process is not None
        code, child.process = child.process.returncode, None
        healthy = now - child.started > HEALTHY_S
        child.pause_s = FIRST_PAUSE_S if healthy else min(2 * child.pause_s, LONGEST_PAUSE_S)
        child.start_at, child.restarts = now + child.pause_s, child.restarts + 1
        logger.warning("%s ended (%s); starting it again. Its log: %s", child.program.name, code, child.program.log)

    def _start(self, child: _Child, now: float) -> None:
        program = child.program
        program.log.parent.mkdir(parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            try:
                child.process = subprocess.Popen(
                    program.command,
                    cwd=program.folder,
                    env={**os.environ, **program.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=_prepare(program.user),
                )
            except OSError as error:
                raise JobError(f"{program.command[0]}: can't be started: {error.strerror}") from None
        child.started = now
        self._note_pids()

    def _note_pids(self) -> None:
        if self._pids is not None:
            known = ((c.program.name, c.process.pid) for c in self._children if c.process is not None)
            self._pids.write_text("".join(f"{name} {pid}\n" for name, pid in known))


def _prepare(user: str | None) -> Callable[[], None]:
    """In the child, before the program: end with the parent, and become another user where one is asked for."""
    account = account_of(user) if user else None
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if account is not None:
            os.initgroups(account.pw_name, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def account_of(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise UsageError(f"no user '{user}' on this machine. Make one with: useradd --system {user}") from None
