"""A whole consortium on this machine: real SuperLink, nginx, SuperNodes and agents, each its own process, over TLS.

What `fedplat federation demo` shows, and what tests and benchmarks start. Kits come from the same provisioning as a
real consortium's; only the sites' rules are those of a demonstration: the data is everybody's, each takes its part.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fedplat.consortium.kit_files import OperatorKit, ServerKit, SiteKit
from fedplat.consortium.kits import provision
from fedplat.consortium.spec import ConsortiumSection, ConsortiumSpec, PartySection, ServerSection
from fedplat.errors import JobError
from fedplat.flower.control import Control, Credentials
from privacy.site_budgets import create_site_ledger, load_site

OPERATOR = "operator"
SITE_FILE = """\
# A site of a demonstration: the files are everybody's, and this site takes its part of them.
[site]
name = "{name}"

[datasets.demo]
tasks = {tasks}
share = "partition"
unit = "{unit}"
epsilon = 50.0
delta = 1e-5
allow_non_private = true

[policy]
show_budget = true
{policy}
"""


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


class LocalFederation:
    """Start it, use `control()` or the operator's kit, leave it: every process it started ends."""

    def __init__(
        self,
        folder: Path,
        sites: int = 3,
        *,
        tasks: Sequence[str] = ("digits",),
        unit: str = "sample",
        policy: str = "",
        names: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """`names`: addresses other than loopback under which the server is reached."""
        self.folder, self.kits = folder, folder / "kits"
        self.names = [f"site-{number + 1}" for number in range(sites)]
        self.environment = {**os.environ, **(environment or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ports = free_ports(2 + 2 * sites)
        self._provision(ports[0], tuple(names))
        self._set_ports(ports, "0.0.0.0" if names else "127.0.0.1")
        for name in self.names:
            text = SITE_FILE.format(name=name, tasks=list(tasks), unit=unit, policy=policy).replace("'", '"')
            self.site(name).site_file.write_text(text)
            create_site_ledger(load_site(self.site(name).site_file))

    def _provision(self, port: int, names: tuple[str, ...]) -> None:
        spec = ConsortiumSpec(
            consortium=ConsortiumSection(name="demo"),
            server=ServerSection(host="127.0.0.1", port=port, names=names),
            sites=tuple(PartySection(name=name) for name in self.names),
            operators=(PartySection(name=OPERATOR),),
        )
        provision(spec, self.kits, lambda name: "")

    def _set_ports(self, ports: list[int], listen: str) -> None:
        """Ports that are free on this machine in place of the usual ones."""
        file = self.kits / "server" / ServerKit.FILE
        text = file.read_text().replace("superlink_port = 9444", f"superlink_port = {ports[1]}")
        file.write_text(text.replace('listen = "0.0.0.0"', f'listen = "{listen}"'))
        for number, name in enumerate(self.names):
            path = self.kits / "sites" / name / SiteKit.FILE
            link, node = ports[2 + 2 * number], ports[3 + 2 * number]
            lines = [
                f"link_port = {link}" if line.startswith("link_port") else
                f"node_port = {node}" if line.startswith("node_port") else line
                for line in path.read_text().splitlines()
            ]  # fmt: skip
            path.write_text("\n".join(lines) + "\n")

    @property
    def server(self) -> ServerKit:
        return ServerKit.load(self.kits / "server")

    @property
    def operator(self) -> OperatorKit:
        return OperatorKit.load(self.kits / "operators" / OPERATOR)

    def site(self, name: str) -> SiteKit:
        return SiteKit.load(self.kits / "sites" / name)

    def control(self) -> Control:
        kit = self.operator
        return Control(kit.server, Credentials(kit.certificate, kit.key, kit.ca).context())

    # --- processes ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start("server")
        for name in self.names:
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str) -> None:
        """Start the server's or a site's supervisor, which starts the rest."""
        kit = self.kits / ("server" if name == "server" else f"sites/{name}")
        command = [sys.executable, "-P", "-m", "fedplat", "server" if name == "server" else "site", "start", str(kit)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a party's supervisor; its processes end with it."""
        process = self._processes.pop(name)
        process.send_signal(how)
        process.wait(timeout=30)

    def process_id(self, party: str, program: str) -> int | None:
        """The process of one program of a party, as its supervisor noted it."""
        kit = self.server.data_folder if party == "server" else self.site(party).state_folder
        try:
            lines = (kit / "pids").read_text().split("\n")
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{program} ")), None)

    def wait_until_online(self, deadline_s: float = 90.0, tick: Callable[[str], None] = lambda text: None) -> None:
        """Wait for the server and all sites."""
        deadline = time.monotonic() + deadline_s
        problem = "the server did not answer"
        while time.monotonic() < deadline:
            self._require_alive()
            try:
                with self.control() as control:
                    online = {node.name for node in control.nodes() if node.status == "online"}
                missing = [name for name in self.names if name not in online]
                if not missing:
                    return
                problem = f"not connected: {', '.join(missing)}"
            except JobError as error:
                problem = str(error)
            tick(problem)
            time.sleep(0.5)
        raise JobError(f"the federation did not come up in {deadline_s:.0f} s: {problem}. Logs: {self.folder}")

    def _require_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                text = (self.folder / f"{name}.log").read_text()[-2000:]
                raise JobError(f"{name} ended with {process.returncode}: {text}")
