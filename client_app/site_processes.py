"""What runs at a site: the link, the SuperNode, and the agent.

The first two are transport. They get copies of exactly the keys they need in a directory of their own, and run as
another user where the kit names one; the agent runs as the kit's owner and shares nothing with them but a secret.
"""

import os
import pwd
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat.consortium.local_tls import LocalTls
from fedplat.errors import UsageError
from fedplat.files import write_file
from fedplat.flower.environment import flower_command, quiet_environment
from fedplat.supervisor import Program, account_of

if TYPE_CHECKING:
    from fedplat.consortium.kit_files import SiteKit


def site_programs(kit: "SiteKit") -> list[Program]:
    """Prepare the transport's directory, and say what to start."""
    state = kit.state_folder
    state.mkdir(mode=0o700, exist_ok=True)
    user = kit.supernode_user or None
    if user is not None and os.geteuid() != 0:
        raise UsageError(
            f"supernode_user = '{user}': only root can start a process as another user. Start this as root, use the "
            "kit's systemd units, or remove the key (`fedplat doctor` then says what that costs)"
        )
    transport = _transport_folder(kit, user)
    local = LocalTls.create(transport)
    write_file(kit.local_certificate, local.certificate.read_bytes())
    secrets = {name: transport / name for name in (kit.key.name, kit.node_key.name, kit.superexec_secret.name)}
    for name, copy in secrets.items():
        write_file(copy, (kit.folder / name).read_bytes(), mode=0o600)
    for path in (kit.certificate, kit.ca):
        shutil.copy(path, transport / path.name)
    _give(transport, user)
    owner = _owner(kit.folder)
    logs = state / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    _give(state, owner)
    return [
        Program("link", [sys.executable, "-m", "fedplat", "site", "link", str(transport), "--server", kit.server,
                         "--port", str(kit.link_port)], logs / "link.log", user=user),
        Program("supernode", _supernode(kit, transport), logs / "supernode.log", quiet_environment(transport),
                user=user, folder=transport),
        Program("agent", [sys.executable, "-m", "fedplat", "site", "agent", str(kit.folder)], logs / "agent.log",
                user=owner),
    ]  # fmt: skip


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


def _transport_folder(kit: "SiteKit", user: str | None) -> Path:
    """Beside the agent's state, or where another user can get at it: the kit itself is closed to others."""
    if user is not None:
        return Path(tempfile.mkdtemp(prefix=f"fedplat-{kit.name}-"))
    folder = kit.state_folder / "transport"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _owner(folder: Path) -> str | None:
    """Whose kit this is, where root starts it for somebody else."""
    uid = folder.stat().st_uid
    return None if uid == os.geteuid() else pwd.getpwuid(uid).pw_name


def _give(folder: Path, user: str | None) -> None:
    """Let a folder and what is in it belong to a user."""
    if user is not None:
        account = account_of(user)
        for path in (folder, *folder.iterdir()):
            os.chown(path, account.pw_uid, account.pw_gid)
