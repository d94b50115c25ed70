"""What runs at a site: the link, the SuperNode, and the agent.

The first two are transport. They get copies of exactly the keys they need in a directory of their own, and run as
another user where the kit names one; the agent runs as the kit's owner and shares nothing with them but a secret.

Root starts them for others, and trusts nothing that lies in their directories: what is read from the kit or written to
it is read and written as its owner, and what root keeps for itself is in directories of its own.
"""

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat.accounts import account_of, acting_as, owner_of
from fedplat.consortium.local_tls import LocalTls
from fedplat.errors import UsageError
from fedplat.files import write_file
from fedplat.flower.environment import flower_command, quiet_environment
from fedplat.root_folders import give, log_folder, remove, run_folder
from fedplat.supervisor import Program

if TYPE_CHECKING:
    from fedplat.consortium.kit_files import SiteKit


@dataclass(frozen=True)
class SiteProcesses:
    """What to start, and where the supervisor keeps its own files."""

    programs: list[Program]
    logs: Path
    pids: Path
    transport: Path
    is_temporary: bool

    def close(self) -> None:
        """The copies of the keys are not left behind where they are not the kit's."""
        if self.is_temporary:
            remove(self.transport)


def site_processes(kit: "SiteKit") -> SiteProcesses:
    """Prepare the transport's directory, and say what to start."""
    owner, node = owner_of(kit.folder), _node_user(kit)
    with acting_as(owner):
        kit.state_folder.mkdir(mode=0o700, exist_ok=True)
        files = _read((kit.key, kit.node_key, kit.superexec_secret, kit.certificate, kit.ca))
    user = node or owner
    transport, certificate = _transport(kit, user, files)
    with acting_as(owner):
        write_file(kit.local_certificate, certificate)
    logs = log_folder(_name(kit)) if owner else kit.state_folder / "logs"
    pids = (logs if owner else kit.state_folder) / "pids"
    programs = [
        Program("link", [sys.executable, "-P", "-m", "fedplat", "site", "link", str(transport), "--server", kit.server,
                         "--port", str(kit.link_port)], logs / "link.log", user=user, folder=transport),
        Program("supernode", _supernode(kit, transport), logs / "supernode.log", quiet_environment(transport),
                user=user, folder=transport),
        Program("agent", [sys.executable, "-P", "-m", "fedplat", "site", "agent", str(kit.folder)], logs / "agent.log",
                user=owner),
    ]  # fmt: skip
    return SiteProcesses(programs, logs, pids, transport, is_temporary=user is not None)


def site_programs(kit: "SiteKit") -> list[Program]:
    return site_processes(kit).programs


def _read(paths: Sequence[Path]) -> dict[str, bytes]:
    try:
        return {path.name: path.read_bytes() for path in paths}
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}. It is a part of the kit") from None


def _supernode(kit: "SiteKit", transport: Path) -> list[str]:
    local = {name: str(transport / f"local.{name}") for name in ("crt", "key")}
    return [
        *flower_command("flower-supernode"),
        "--root-certificates", local["crt"],
        "--superlink", f"127.0.0.1:{kit.link_port}",
        "--auth-supernode-private-key", str(transport / kit.node_key.name),
        "--isolation", "process",
        "--host", "127.0.0.1", "--port", str(kit.node_port),
        "--ssl-certfile", local["crt"], "--ssl-keyfile", local["key"], "--ssl-ca-certfile", local["crt"],
        "--superexec-auth-secret-file", str(transport / kit.superexec_secret.name),
    ]  # fmt: skip


def _node_user(kit: "SiteKit") -> str | None:
    user = kit.supernode_user or None
    if user is not None and os.geteuid() != 0:
        raise UsageError(
            f"supernode_user = '{user}': only root can start a process as another user. Start this as root, use the "
            "kit's systemd units, or remove the key (`fedplat doctor` then says what that costs)"
        )
    if user is not None and account_of(user).pw_uid == 0:
        raise UsageError(f"supernode_user = '{user}': the SuperNode talks to the network and must not be root")
    return user


def _transport(kit: "SiteKit", user: str | None, files: Mapping[str, bytes]) -> tuple[Path, bytes]:
    """Beside the agent's state; or, for another user, in a directory of root's: the kit itself is closed to others.
    With the certificate that the SuperNode will show."""
    if user is None:
        folder = kit.state_folder / "transport"
        folder.mkdir(mode=0o700, exist_ok=True)
    else:
        folder = run_folder(_name(kit))
    certificate = LocalTls.create(folder).certificate.read_bytes()
    for name, content in files.items():
        write_file(folder / name, content, mode=0o600)
    if user is not None:
        give(folder, user)
    return folder, certificate


def _name(kit: "SiteKit") -> str:
    """One for each kit on this machine, also if two consortia call a site the same."""
    return f"{kit.consortium}-{kit.name}-{hashlib.sha256(str(kit.folder).encode()).hexdigest()[:8]}"
