"""One job on real processes over TLS: on our federation, and on plain Flower with the repository as its app.

Both start their servers and nodes first; what is timed begins when the job is submitted and ends with the run's last
event. Memory is the peak resident size of the process that drives the run, and of the SuperLink beside it.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.process_tree import MARK
from fedplat.cli.operator import ready_for_sites, sign
from fedplat.errors import JobError
from fedplat.events import Event, RoundFinished, RoundStarted, RunFinished, read_events
from fedplat.job import Job
from fedplat.rundir import RunDirectory, list_runs
from simulations.local_federation import LocalFederation
from tests.federation.flower_processes import FlowerFederation, copy_app

REPOSITORY = Path(__file__).parents[1]
SAMPLE_S = 0.1


@dataclass(frozen=True)
class FederationRun:
    """What one run took."""

    whole_s: float
    """From submission to the last event."""
    rounds_s: list[float]
    """Train phases, from `round_started` to `round_finished`."""
    model: bytes
    cpu_s: float
    """Processor time of all parties: what a loaded machine changes least."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak resident bytes by program."""

    @property
    def round_s(self) -> float:
        """A steady train phase: the first also loads data and model."""
        return statistics.median(self.rounds_s[1:] or self.rounds_s)


class RunFailed(RuntimeError):
    """The run did not finish."""


def run_ours(job: Job, folder: Path, deadline_s: float, load: int = 0) -> FederationRun:
    """The job on our federation: SuperLink, nginx, links, SuperNodes and agents."""
    environment = _environment()
    programs = {"driver": "executor", "superlink": "flower-superlink"}
    tasks = (job.task.name,)
    with LocalFederation(folder, job.cohort.clients, tasks=tasks, environment=environment) as federation:
        federation.wait_until_online()
        job = ready_for_sites(job, federation.operator)
        with busy(load), ProcessWatch(environment[MARK], programs) as watch:
            started = time.time()
            with federation.control() as control:
                run_id = control.start_run(sign(job, federation.operator))
            while not _is_over(federation, run_id):
                if time.time() - started > deadline_s:
                    raise RunFailed(f"no end after {deadline_s:g} s")
                time.sleep(2.0)
        return _result(list_runs(federation.server.runs_folder), started, watch)


def run_plain(job: Job, folder: Path, deadline_s: float, load: int = 0, database: bool = False) -> FederationRun:
    """The job as a Flower app: `flwr run`, default isolation, a new ClientApp process per message."""
    environment = _environment()
    programs = {"driver": "flwr-serverapp", "superlink": "flower-superlink"}
    app, config = copy_app(folder), folder / "run.toml"
    config.write_text(f"job = '{job.canonical()}'\n", encoding="utf-8")
    options = ("--database", str(folder / "state.db")) if database else ()
    with FlowerFederation(folder, job.cohort.clients, superlink_options=options, own=environment) as federation:
        with busy(load), ProcessWatch(environment[MARK], programs) as watch:
            started = time.time()
            try:
                federation.flwr("run", str(app), "here", "--stream", "--run-config", str(config), timeout_s=deadline_s)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise RunFailed(str(error)[-500:]) from None
        return _result(list_runs(folder / "runs"), started, watch)


def _is_over(federation: LocalFederation, run_id: int) -> bool:
    with (
        contextlib.suppress(JobError),
        federation.control() as control,
    ):  # a SuperLink under load has no answer at times
        return control.runs(run_id)[0].status.startswith("finished")
    return False


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), MARK: uuid.uuid4().hex}


def _result(runs: list[RunDirectory], started: float, watch: "ProcessWatch") -> FederationRun:
    if len(runs) != 1:
        raise RunFailed(f"{len(runs)} runs were begun")
    events: list[Event] = read_events(runs[0].events_file)
    ends = [event.time for event in events if isinstance(event, RunFinished)]
    if not ends:
        raise RunFailed(f"the run did not finish: {events[-1]}")
    begun = {event.round: event.time for event in events if isinstance(event, RoundStarted)}
    rounds = [event.time - begun[event.round] for event in events if isinstance(event, RoundFinished)]
    return FederationRun(ends[0] - started, rounds, runs[0].model_file.read_bytes(), watch.cpu_s, watch.peaks)


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy with something else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class ProcessWatch:
    """Processor time of all processes that carry a mark in their environment, and the peak memory of some programs."""

    def __init__(self, mark: str, programs: dict[str, str]) -> None:
        self._mark, self._programs = f"{MARK}={mark}".encode(), programs
        self._names: dict[int, str | None] = {}
        self._ticks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> "ProcessWatch":
        self._look()
        self._before = sum(self._ticks.values())
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """What was used since the watch began, up to the last look at each process."""
        return (sum(self._ticks.values()) - self._before) / os.sysconf("SC_CLK_TCK")

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        for process in Path("/proc").iterdir():
            number = int(process.name) if process.name.isdigit() else 0
            with contextlib.suppress(OSError, ValueError):  # it ends while we look
                if number and self._is_ours(number, process):
                    fields = (process / "stat").read_text().rpartition(")")[2].split()
                    self._ticks[number] = int(fields[11]) + int(fields[12])
                    name = self._names[number]
                    if name is not None:
                        self.peaks[name] = max(self.peaks.get(name, 0), _peak_bytes(process))

    def _is_ours(self, number: int, process: Path) -> bool:
        if self._names.get(number) is not None:
            return True
        if self._mark not in (process / "environ").read_bytes():
            return False
        words = (process / "cmdline").read_bytes().split(b"\0")  # a child is its parent until it has its own program
        names = {word.decode(errors="replace").rpartition("/")[2] for word in words[:6]}
        self._names[number] = next((name for name, program in self._programs.items() if program in names), None)
        return True


def _peak_bytes(process: Path) -> int:
    for line in (process / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
