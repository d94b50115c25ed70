"""Run a command as a tree of processes that is watched, bounded in time, and gone afterwards.

A process belongs to the tree if it is in the command's session, descends from a member, or carries the command's mark
in its environment: Ray's daemons outlive their parents, and some change their title over their environment. Memory is
the sum over the tree of PSS, in which a page that n processes share counts 1/n in each.
"""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "FEDPLAT_BENCH_TREE"
MEMORY_SAMPLE_S, CPU_SAMPLE_S = 0.05, 0.25
PATIENCE_S = 10.0
"""Time that a tree is given to end by itself, after its first process ended or was told to stop."""


class RunError(RuntimeError):
    """The command failed or took too long; the message ends with what it wrote."""


@dataclass(frozen=True)
class TreeRun:
    started: float
    """Seconds since the epoch."""
    wall_s: float
    stdout: str
    peak_pss_bytes: int
    """0 if memory was not watched."""
    peak_processes: int
    others_cores: float
    """How many cores the rest of the machine kept busy on average."""


def run_tree(command: Sequence[str], env: Mapping[str, str], cwd: Path, timeout_s: float, memory: bool) -> TreeRun:
    """Run the command to its end. Memory is watched on request only: looking often costs the watched time."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started, clock, busy_s, ours_s = time.time(), time.perf_counter(), machine_busy_s(), _children_s()
        process = subprocess.Popen(
            command, env={**env, MARK: mark}, cwd=cwd, stdout=out, stderr=err, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        watch = TreeWatch(process.pid, mark)
        sampler = threading.Thread(target=watch.sample_until_stopped, args=(memory,), daemon=True)
        sampler.start()
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            wall_s = time.perf_counter() - clock
            busy_s = machine_busy_s() - busy_s
            watch.stopped.set()
            sampler.join()
            _end(process, watch)
        if code != 0:
            why = f"took longer than {timeout_s:g} s" if code is None else f"ended with code {code}"
            raise RunError(f"{' '.join(command)} {why}\n{_tail(out)}\n{_tail(err)}")
        out.seek(0)
        # What the kernel charged for ended children misses orphans, and what was seen misses the last moments.
        others_s = max(0.0, busy_s - max(watch.cpu_s(), _children_s() - ours_s))
        return TreeRun(started, wall_s, out.read(), watch.peak_pss_bytes, watch.peak_processes, others_s / wall_s)


def machine_busy_s() -> float:
    """CPU time that all processes of the machine have used."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class TreeWatch:
    """Finds the processes of a tree and adds up their memory."""

    def __init__(self, root: int, mark: str) -> None:
        self._root, self._mark = root, f"{MARK}={mark}".encode()
        self._member: dict[tuple[int, str], bool] = {}
        self._cpu_ticks: dict[tuple[int, str], int] = {}
        self.stopped = threading.Event()
        self.peak_pss_bytes = 0
        self.peak_processes = 0

    def sample_until_stopped(self, memory: bool) -> None:
        while not self.stopped.is_set():
            members = self.members()
            self.peak_processes = max(self.peak_processes, len(members))
            if memory:
                self.peak_pss_bytes = max(self.peak_pss_bytes, sum(_pss_bytes(pid) for pid in members))
            self.stopped.wait(MEMORY_SAMPLE_S if memory else CPU_SAMPLE_S)

    def cpu_s(self) -> float:
        """CPU time of all processes that were seen."""
        return sum(self._cpu_ticks.values()) / os.sysconf("SC_CLK_TCK")

    def members(self) -> list[int]:
        """The living processes of the tree, parents before children."""
        found: list[int] = []
        alive: dict[tuple[int, str], bool] = {}
        for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            stat = _stat(pid)
            if stat is None:
                continue
            parent, session, start, ticks = stat
            # Once a member, always one; a process that isn't can still become one by exec (its environment changes).
            member = (
                self._member.get((pid, start), False)
                or session == self._root
                or parent in found
                or self._is_marked(pid)
            )
            alive[pid, start] = member
            if member:
                found.append(pid)
                self._cpu_ticks[pid, start] = ticks
        self._member = alive
        return found

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # ended, or another user's
            return False


def _stat(pid: int) -> tuple[int, int, str, int] | None:
    """Parent, session, start time and used clock ticks of a living process; None for one that ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    if fields[0] in "ZX":
        return None
    return int(fields[1]), int(fields[3]), fields[19], int(fields[11]) + int(fields[12])


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # it ended while we looked
        pass
    return 0


def _end(process: "subprocess.Popen[bytes]", watch: TreeWatch) -> None:
    """Wait for the rest of the tree, then end what is left of it, each process by its number."""
    if process.poll() is None:
        process.terminate()
    deadline = time.monotonic() + PATIENCE_S
    while (left := watch.members()) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _tail(file: object, size: int = 2000) -> str:
    assert hasattr(file, "seek") and hasattr(file, "read")
    file.seek(0)
    return str(file.read())[-size:].strip()
