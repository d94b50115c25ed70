"""What runs at the server: the SuperLink on loopback, nginx in front of it, and the executor.

The SuperLink lets whoever reaches it do everything, so nobody does: it listens on 127.0.0.1 only. The front demands a
certificate of this consortium and lets each role reach just its own paths.
"""

import logging
import os
import secrets
import shutil
import signal
import sys
from typing import TYPE_CHECKING

from fedplat.consortium.front import front_command, write_front
from fedplat.consortium.identity import write_secret
from fedplat.errors import UsageError
from fedplat.flower.environment import flower_command, quiet_environment
from fedplat.log_files import limit_log
from fedplat.supervisor import Program, Supervisor

if TYPE_CHECKING:
    from fedplat.consortium.kit_files import ServerKit

logger = logging.getLogger(__name__)
FRONT = "front"
LARGE_BUFFERS_GO_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc returns buffers above this size when they are freed; else it keeps many of a model's chunks for later use."""
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
"""nginx is where users don't look by default."""


def server_programs(kit: "ServerKit") -> list[Program]:
    """Prepare the state directory, and say what to start."""
    state = kit.data_folder
    for folder in (state, state / "logs", kit.runs_folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_nginx()
    write_front(kit)
    if not kit.superexec_secret.exists():
        write_secret(kit.superexec_secret, secrets.token_bytes(32))
    logs = state / "logs"
    return [
        Program("superlink", _superlink(kit), logs / "superlink.log", quiet_environment(state), folder=state),
        Program(FRONT, front_command(kit), logs / "front.log", {"PATH": SEARCH}, folder=state),
        Program("executor", [sys.executable, "-P", "-m", "fedplat", "server", "executor", str(kit.folder)],
                logs / "executor.log", LARGE_BUFFERS_GO_BACK, folder=state),
    ]  # fmt: skip


def _require_nginx() -> None:
    if shutil.which("nginx", path=SEARCH) is None:
        raise UsageError("nginx is not installed; it is the server's front. Do: apt-get install nginx-light")


def _superlink(kit: "ServerKit") -> list[str]:
    return [
        *flower_command("flower-superlink"),
        "--ssl-ca-certfile", str(kit.ca),
        "--ssl-certfile", str(kit.certificate),
        "--ssl-keyfile", str(kit.key),
        "--enable-supernode-auth",
        "--isolation", "process",
        "--host", "127.0.0.1", "--port", str(kit.superlink_port),
        "--database", str(kit.data_folder / "superlink.sqlite"),
        "--superexec-auth-secret-file", str(kit.superexec_secret),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


class AccessWatch:
    """Lets the front follow the access list: a revoked certificate is refused from the next connection on."""

    def __init__(self, kit: "ServerKit", supervisor: Supervisor) -> None:
        self._kit, self._supervisor = kit, supervisor
        self._seen = self._stamp()
        self._logs = [kit.data_folder / "front" / name for name in ("access.log", "error.log")]

    def __call__(self) -> bool:
        if self._stamp() != self._seen:
            self._follow()
        for log in self._logs:
            limit_log(log)
        return True

    def _follow(self) -> None:
        stamp = self._stamp()
        try:
            write_front(self._kit)
        except UsageError as error:
            logger.error("the access list can't be used, the old one stays in force: %s", error)
        except OSError as error:
            logger.error("the front's rules can't be written, trying again: %s", error.strerror)
            return
        else:
            self._supervisor.signal(FRONT, signal.SIGHUP)
        self._seen = stamp

    def _stamp(self) -> int:
        try:
            return self._kit.access.stat().st_mtime_ns
        except OSError:
            return 0
