"""A site behind a network of its own (a namespace): slow, then cut, then back. Needs root and iproute2."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedplat.cli.operator import ready_for_sites, sign
from fedplat.consortium.kit_files import SiteKit
from fedplat.events import ClientFailed, RoundFinished, RunFinished, read_events
from fedplat.rundir import list_runs
from simulations.local_federation import LocalFederation
from tests.federation.requirements import needs_nginx

HOST, GUEST = "198.18.77.1", "198.18.77.2"
"""From the range that is set aside for tests of networks."""
FAR = "site-2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def namespaces_permitted() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"fedplat-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


@contextmanager
def network() -> Iterator[str]:
    """A namespace joined to this machine by a pair of virtual cables; yields its name."""
    name, here, there = f"fp{os.getpid()}", f"fph{os.getpid() % 10000}", f"fpg{os.getpid() % 10000}"
    ip("netns", "add", name)
    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("addr", "add", f"{HOST}/30", "dev", here)
        ip("link", "set", here, "up")
        for command in (
            ["addr", "add", f"{GUEST}/30", "dev", there],
            ["link", "set", there, "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", name, *command)
        yield name
    finally:
        subprocess.run(["ip", "link", "del", here], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def cable(state: str) -> None:
    ip("link", "set", f"fph{os.getpid() % 10000}", state)


class FarFederation(LocalFederation):
    """The second site lives in the namespace and reaches the server over the cable."""

    namespace = ""

    def start(self, name: str) -> None:
        if name != FAR:
            super().start(name)
            return
        file = self.kits / "sites" / FAR / SiteKit.FILE
        port = self.server.port
        file.write_text(file.read_text().replace(f"127.0.0.1:{port}", f"{HOST}:{port}"))
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "fedplat", "site", "start"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*command, str(self.kits / "sites" / FAR)], env=self.environment, stdout=log, stderr=log
            )


@pytest.mark.slow
@needs_nginx
@pytest.mark.skipif(not namespaces_permitted(), reason="network namespaces are not permitted here")
def test_a_slow_and_then_cut_link_costs_rounds_not_the_run(tmp_path: Path, tiny_job, simulated):
    with network() as name:
        federation = FarFederation(tmp_path / "f", 2, names=(HOST,), environment={"OMP_NUM_THREADS": "1"})
        federation.namespace = name
        delay = ["tc", "qdisc", "add", "dev", f"fph{os.getpid() % 10000}", "root", "netem", "delay", "40ms"]
        subprocess.run(delay, capture_output=True)  # where the kernel has no netem, the link is only fast
        with federation:
            federation.wait_until_online()
            settings = {"cohort__clients": 2, "cohort__fraction": 1.0, "job__rounds": 6, "cohort__deadline_s": 25.0}
            job = ready_for_sites(tiny_job(**settings), federation.operator)
            with federation.control() as control:
                control.start_run(sign(job, federation.operator))
            run = wait_for_round(federation, 2)
            cable("down")
            time.sleep(30)
            cable("up")
            wait_for_round(federation, 6)
            deadline = time.monotonic() + 60
            while not any(isinstance(e, RunFinished) for e in read_events(run.events_file)):
                assert time.monotonic() < deadline
                time.sleep(0.2)
    events = read_events(run.events_file)
    late = [event for event in events if isinstance(event, ClientFailed)]
    assert late and {event.client for event in late} == {"client-1"}, "whoever is missing is named"
    accepted = [event.accepted for event in events if isinstance(event, RoundFinished)]
    assert accepted[0] == 2 and min(accepted) == 1 and len(accepted) == 6


def wait_for_round(federation: LocalFederation, number: int):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for run in list_runs(federation.server.runs_folder):
            done = read_events(run.events_file) if run.events_file.exists() else []
            if any(isinstance(event, RoundFinished) and event.round >= number for event in done):
                return run
        time.sleep(0.1)
    raise TimeoutError(f"round {number} did not end; logs: {federation.folder}")
