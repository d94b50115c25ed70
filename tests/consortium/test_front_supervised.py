"""The front under its supervisor: whatever is killed, nobody is served by the access list of yesterday."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedplat import log_files
from fedplat.consortium.kit_files import ServerKit
from fedplat.process_groups import members, wait_until_gone
from fedplat.supervisor import Supervisor
from server_app.server_processes import AccessWatch
from tests.consortium.conftest import Consortium
from tests.consortium.front_server import NGINX, ask, free_port, upstream

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
SUPERVISED = """
import sys
from pathlib import Path
from fedplat.consortium.kit_files import ServerKit
from fedplat.supervisor import Supervisor
from server_app.server_processes import AccessWatch, server_programs
kit = ServerKit.load(Path(sys.argv[1]))
programs = [program for program in server_programs(kit) if program.name == "front"]
supervisor = Supervisor(programs, kit.data_folder / "pids")
supervisor.run(AccessWatch(kit, supervisor))
"""


@dataclass
class World:
    kit: ServerKit
    consortium: Consortium
    supervisor: subprocess.Popen[bytes]

    def front(self) -> int:
        pids = self.kit.data_folder / "pids"
        text = pids.read_text() if pids.exists() else ""
        return int(text.split()[1]) if text else 0

    def ask(self, who: str, path: str = "/v1/fleet/get-run") -> int | None:
        kit = self.consortium.kit(who)
        try:
            return ask(self.kit.port, self.kit.ca, path, (kit / "tls.crt", kit / "tls.key"))
        except OSError:
            return None


def wait(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    alpha = Consortium(tmp_path / "alpha", port=free_port())
    alpha.provision()
    server = alpha.kits / "server"
    text = (server / "server.toml").read_text().replace("0.0.0.0", "127.0.0.1").replace("9444", str(free_port()))
    (server / "server.toml").write_text(text)
    kit = ServerKit.load(server)
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(server)], cwd=Path(__file__).parents[2])
    made = World(kit, alpha, process)
    try:
        with upstream(kit):
            wait(lambda: made.ask("north") == 200)
            yield made
    finally:
        group = made.front()
        process.kill()
        process.wait()
        if group:
            wait_until_gone([group])


def test_a_killed_front_is_replaced_and_its_workers_serve_nobody(world: World) -> None:
    before = world.front()
    os.kill(before, signal.SIGKILL)
    world.consortium.provision(revoke=["south"])
    wait(lambda: world.front() != before and world.ask("north") == 200)
    assert members(before) == []
    wait(lambda: world.ask("south") == 403)
    for _ in range(20):  # whichever worker it is
        assert (world.ask("south"), world.ask("north")) == (403, 200)


def test_a_revocation_after_the_front_was_killed_reaches_all_workers(world: World) -> None:
    before = world.front()
    os.kill(before, signal.SIGKILL)
    wait(lambda: world.front() != before and world.ask("south") == 200)
    world.consortium.provision(revoke=["south"])
    wait(lambda: world.ask("south") == 403)
    for _ in range(20):
        assert world.ask("south") == 403


def test_a_killed_supervisor_leaves_no_process_and_a_free_port(world: World) -> None:
    group = world.front()
    assert len(members(group)) >= 2
    world.supervisor.kill()
    world.supervisor.wait()
    wait(lambda: members(group) == [], 10)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", world.kit.port))


def test_polls_that_were_served_are_not_logged(world: World) -> None:
    log = world.kit.data_folder / "front" / "access.log"
    for path in ("/v1/fleet/pull-messages", "/v1/fleet/pull-messages?x=1", "/v1/fleet/get-fab"):
        assert world.ask("north", path) == 200
    assert world.ask("olga", "/v1/fleet/pull-messages") == 403
    wait(lambda: "403" in log.read_text())
    lines = [line for line in log.read_text().splitlines() if "get-run" not in line]
    assert [line.split()[2:6] for line in lines] == [
        ["north", "POST", "/v1/fleet/get-fab", "200"],
        ["olga", "POST", "/v1/fleet/pull-messages", "403"],
    ]


def test_the_fronts_own_logs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LARGEST_LOG", 10)
    alpha = Consortium(tmp_path / "alpha")
    alpha.provision()
    kit = ServerKit.load(alpha.kits / "server")
    log = kit.data_folder / "front" / "access.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line that is too long\n")
    assert AccessWatch(kit, Supervisor([]))()
    assert log.read_text() == "" and log.with_name("access.log.1").read_text() == "a line that is too long\n"
