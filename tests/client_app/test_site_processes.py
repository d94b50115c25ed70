"""What `fedplat site start` does as root in directories that are not root's: nothing through a link. Real processes."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client_app.site_lock import lock_ledger
from client_app.site_processes import site_processes
from fedplat import root_folders
from fedplat.accounts import acting_as, owner_of
from fedplat.consortium.kit_files import SiteKit
from fedplat.errors import UsageError
from fedplat.files import write_directory, write_file
from privacy.site_budgets import load_site
from simulations.local_federation import LocalFederation

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can work for other users")
OWNER, NODE = "nobody", "daemon"


def wait(condition: Callable[[], object], deadline_s: float = 40.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def federation(tmp_path: Path) -> LocalFederation:
    return LocalFederation(tmp_path, 1)


@pytest.fixture
def kit(federation: LocalFederation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SiteKit]:
    """A kit that belongs to another user than root, and directories of root's own."""
    for name in ("RUN", "LOGS"):
        monkeypatch.setattr(root_folders, name, tmp_path / name.lower())
    found = federation.site("site-1")
    account = pwd.getpwnam(OWNER)
    for path in (found.folder, *found.folder.rglob("*")):
        os.chown(path, account.pw_uid, account.pw_gid)
    closed = {path: path.stat().st_mode for path in found.folder.parents if not path.stat().st_mode & 1}
    for path, mode in closed.items():
        path.chmod(mode | 0o11)
    yield found
    for path, mode in closed.items():
        path.chmod(mode)


def victims(folder: Path) -> list[Path]:
    made = [folder / f"victim{n}" for n in range(4)]
    for path in made:
        path.write_text("root's own\n")
        path.chmod(0o600)
    return made


@as_root
def test_links_in_the_owners_directories_lead_root_nowhere(kit: SiteKit, tmp_path: Path) -> None:
    roots = victims(tmp_path)
    with acting_as(OWNER):
        kit.state_folder.mkdir(mode=0o700)
        (kit.state_folder / "x").symlink_to(roots[0])
        (kit.state_folder / ".local.crt.part").symlink_to(roots[1])
        (kit.state_folder / "logs").symlink_to(tmp_path)
        (kit.state_folder / "pids").symlink_to(roots[2])
        (kit.state_folder / "transport").symlink_to(tmp_path)
    before = sorted(tmp_path.iterdir())
    made = site_processes(kit)
    made.close()
    for path in roots:
        assert path.read_text() == "root's own\n" and path.stat().st_uid == 0
    new = set(tmp_path.iterdir()) - set(before)
    assert new == {tmp_path / "run", tmp_path / "logs"}
    for folder in (made.logs, made.pids.parent):
        assert folder.lstat().st_uid == 0 and folder.stat().st_mode & 0o777 == 0o700
        assert kit.folder not in folder.resolve().parents


@as_root
@pytest.mark.parametrize("name", ["tls.key", "node.key", "ca.crt"])
def test_root_reads_nothing_for_the_owner_that_the_owner_can_not(kit: SiteKit, tmp_path: Path, name: str) -> None:
    """Else a link to /etc/shadow would be copied to where the SuperNode's user reads it."""
    (secret, *_) = victims(tmp_path)
    path = {"tls.key": kit.key, "node.key": kit.node_key, "ca.crt": kit.ca}[name]
    with acting_as(OWNER):
        path.unlink()
        path.symlink_to(secret)
    with pytest.raises(UsageError, match="Permission denied"):
        site_processes(kit)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fedplat", "site", "start", str(kit.folder)], capture_output=True, timeout=120
    )
    assert done.returncode != 0 and b"root's own" not in done.stdout + done.stderr


@as_root
def test_the_transports_directory_is_the_nodes_alone_and_gone_at_the_end(kit: SiteKit, tmp_path: Path) -> None:
    isolated = kit.model_copy(update={"supernode_user": NODE})
    made = site_processes(isolated)
    node = pwd.getpwnam(NODE).pw_uid
    assert made.transport.parent == tmp_path / "run" and made.transport.parent.stat().st_uid == 0
    for path in (made.transport, *made.transport.iterdir()):
        assert path.stat().st_uid == node
        assert not path.stat().st_mode & 0o077 or path.name == "local.crt"
    assert [program.user for program in made.programs] == [NODE, NODE, OWNER]
    assert kit.local_certificate.stat().st_uid == pwd.getpwnam(OWNER).pw_uid
    assert kit.local_certificate.read_bytes() == (made.transport / "local.crt").read_bytes()
    (made.transport / "stale").symlink_to(kit.folder)
    again = site_processes(isolated)
    assert again.transport == made.transport and not (made.transport / "stale").is_symlink()
    again.close()
    assert not made.transport.exists() and kit.site_file.exists()


@as_root
def test_without_a_node_user_the_transport_runs_as_the_owner_and_never_as_root(kit: SiteKit) -> None:
    assert [program.user for program in site_processes(kit).programs] == [OWNER, OWNER, OWNER]
    with pytest.raises(UsageError, match="must not be root"):
        site_processes(kit.model_copy(update={"supernode_user": "root"}))


@as_root
def test_a_directory_of_somebody_else_in_the_place_of_roots_is_refused(kit: SiteKit, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 1, 1)
    with pytest.raises(UsageError, match="must be a directory of root's own"):
        site_processes(kit)


@as_root
def test_acting_as_a_user_ends(tmp_path: Path) -> None:
    before = (os.geteuid(), os.getegid(), os.getgroups())
    with pytest.raises(RuntimeError), acting_as(OWNER):
        assert os.geteuid() == pwd.getpwnam(OWNER).pw_uid and os.getegid() == pwd.getpwnam(OWNER).pw_gid
        raise RuntimeError
    assert (os.geteuid(), os.getegid(), os.getgroups()) == before
    assert owner_of(tmp_path) is None


def test_our_own_kit_keeps_everything_inside(federation: LocalFederation) -> None:
    kit = federation.site("site-1")
    made = site_processes(kit)
    made.close()
    assert made.transport == kit.state_folder / "transport" and (made.transport / "tls.key").exists()
    assert made.pids == kit.state_folder / "pids" and [program.user for program in made.programs] == [None] * 3


def test_no_program_imports_from_the_directory_it_is_started_in(federation: LocalFederation) -> None:
    from server_app.server_processes import server_programs

    programs = [*site_processes(federation.site("site-1")).programs, *server_programs(federation.server)]
    for program in programs:
        assert program.folder.is_absolute()
        if program.command[0] == sys.executable:
            assert program.command[1] == "-P"


@pytest.mark.parametrize("party", ["site", "server"])
def test_a_second_start_of_a_kit_is_refused_in_words(party: str, federation: LocalFederation, tmp_path: Path) -> None:
    folder = federation.kits / ("server" if party == "server" else "sites/site-1")
    command = [sys.executable, "-P", "-m", "fedplat", party, "start", str(folder)]
    (folder / "fedplat.py").write_text("raise SystemExit('imported from the directory it was started in')")
    first = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        pids = folder / "state" / "pids"
        wait(lambda: pids.exists() and pids.read_text().count("\n") == 3)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.crt")}
        second = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert second.returncode != 0 and "started already" in second.stderr + second.stdout
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.crt")} == before
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        first.wait(30)


@as_root
def test_a_server_is_not_run_as_root_for_somebody_else(federation: LocalFederation) -> None:
    os.chown(federation.server.folder, 1, 1)
    command = [sys.executable, "-P", "-m", "fedplat", "server", "start", str(federation.server.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "a server needs no root" in done.stderr + done.stdout
    assert not federation.server.data_folder.exists()


def test_copies_of_a_kit_that_share_a_ledger_have_one_agent(federation: LocalFederation, tmp_path: Path) -> None:
    kit = federation.site("site-1")
    ledger = load_site(kit.site_file).ledger.resolve()
    copy = tmp_path / "copy"
    shutil.copytree(kit.folder, copy)
    (tmp_path / "link.sqlite").symlink_to(ledger)
    text = kit.site_file.read_text()
    (copy / "site.toml").write_text(
        text.replace('name = "site-1"', f'name = "site-1"\nledger = "{tmp_path / "link.sqlite"}"')
    )
    held = lock_ledger(load_site(kit.site_file))
    with pytest.raises(UsageError, match="another agent uses the ledger"):
        lock_ledger(load_site(copy / "site.toml"))
    os.close(held)
    os.close(lock_ledger(load_site(copy / "site.toml")))


def test_files_are_not_written_through_links(tmp_path: Path) -> None:
    (victim, *_) = victims(tmp_path)
    for mode in (None, 0o600):
        (tmp_path / ".made.part").symlink_to(victim)
        (tmp_path / "made").unlink(missing_ok=True)
        (tmp_path / "made").symlink_to(victim)
        write_file(tmp_path / "made", b"new", mode)
        assert (tmp_path / "made").read_bytes() == b"new" and not (tmp_path / "made").is_symlink()
    write_directory(tmp_path / "folder", {"a": b"1"})
    assert victim.read_text() == "root's own\n"
