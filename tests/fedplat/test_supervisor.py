"""Processes are kept running while the supervisor lives, and none outlives it. All processes here are real."""

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedplat import supervisor as supervisors
from fedplat.errors import JobError, UsageError
from fedplat.supervisor import Program, Supervisor, account_of

DEADLINE_S = 30.0
SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """A zombie is dead: it waits for nobody but its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Program]:
    def make(name: str = "sleeper", code: str = SLEEP, **settings: object) -> Program:
        return Program(name, [sys.executable, "-S", "-c", code], tmp_path / "logs" / f"{name}.log", **settings)

    return make


class Running:
    """A supervisor that a test looks after by itself."""

    def __init__(self, programs: list[Program], pids: Path) -> None:
        self.supervisor, self.pids = Supervisor(programs, pids), pids

    def processes(self) -> dict[str, int]:
        lines = self.pids.read_text().splitlines() if self.pids.exists() else []
        return {name: int(pid) for name, pid in (line.split() for line in lines)}

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> object:
            self.supervisor.look()
            return condition()

        wait(look)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.setattr(supervisors, "GRACE_S", 1.0)
    made: list[Running] = []

    def start(*programs: Program) -> Running:
        made.append(Running(list(programs), tmp_path / "pids"))
        made[-1].supervisor.look()
        return made[-1]

    yield start
    for one in made:
        one.supervisor.stop()


def test_all_programs_run_and_the_pids_file_names_them(running, program):
    run = running(program("one"), program("two"))
    assert list(run.processes()) == ["one", "two"]
    assert all(alive(pid) for pid in run.processes().values())


def test_what_dies_is_started_again_and_the_others_are_left_alone(running, program):
    run = running(program("one"), program("two"))
    before = run.processes()
    os.kill(before["one"], signal.SIGKILL)
    run.until(lambda: run.processes()["one"] != before["one"])
    assert run.processes()["two"] == before["two"] and alive(before["two"])
    assert alive(run.processes()["one"])


def test_a_program_that_ends_by_itself_is_started_again(running, program, tmp_path):
    run = running(program("short", "print('here', flush=True)"))
    log = tmp_path / "logs" / "short.log"
    run.until(lambda: log.read_text().count("here") >= 3)


def test_pauses_grow_while_a_program_keeps_dying(running, program, monkeypatch):
    monkeypatch.setattr(supervisors, "LONGEST_PAUSE_S", 0.8)
    run = running(program("short", "pass"))
    (child,) = run.supervisor._children
    pauses = [child.pause_s]
    for restarts in range(1, 5):
        run.until(lambda wanted=restarts: child.restarts == wanted)
        pauses.append(child.pause_s)
        earliest = child.start_at
        run.until(lambda: child.process is not None)
        assert child.started >= earliest  # it did wait
    assert pauses == [0.2, 0.4, 0.8, 0.8, 0.8]


def test_a_program_that_was_well_for_a_while_is_not_held_back(running, program, monkeypatch):
    monkeypatch.setattr(supervisors, "HEALTHY_S", 0.0)
    run = running(program("one"))
    (child,) = run.supervisor._children
    child.pause_s = 10.0
    before = run.processes()["one"]
    os.kill(before, signal.SIGKILL)
    run.until(lambda: run.processes()["one"] != before)
    assert child.pause_s == supervisors.FIRST_PAUSE_S


def test_stop_ends_all_also_one_that_does_not_listen(running, program, tmp_path):
    run = running(program("kind"), program("deaf", STUBBORN), program("other"))
    wait(lambda: "deaf" in (tmp_path / "logs" / "deaf.log").read_text())
    pids = run.processes().values()
    run.supervisor.stop()
    assert not any(alive(pid) for pid in pids) and not run.pids.exists()
    run.supervisor.stop()  # once more is no error


def test_programs_are_told_to_stop_before_they_are_killed(running, program, tmp_path):
    polite = (
        "import signal, sys, time\n"
        "def bye(*_): print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye); print('ready', flush=True); time.sleep(600)"
    )
    run = running(program("polite", polite))
    log = tmp_path / "logs" / "polite.log"
    wait(lambda: "ready" in log.read_text())
    run.supervisor.stop()
    assert "saved" in log.read_text()


def test_a_signal_reaches_the_one_that_it_is_for(running, program):
    run = running(program("one"), program("two"))
    before = run.processes()
    run.supervisor.signal("two", signal.SIGKILL)
    wait(lambda: not alive(before["two"]))
    run.supervisor.signal("nobody", signal.SIGKILL)
    assert alive(before["one"])


def test_run_ends_all_when_it_is_told_to_or_interrupted(program, tmp_path):
    seen: list[int] = []

    def twice() -> bool:
        if run.processes():
            seen.append(run.processes()["one"])
        return len(seen) < 2

    run = Running([program("one")], tmp_path / "pids")
    run.supervisor.run(twice)
    assert seen and not alive(seen[0])

    def interrupted() -> bool:
        if run.processes():
            seen.append(run.processes()["one"])
            raise KeyboardInterrupt
        return True

    run = Running([program("one")], tmp_path / "pids")
    with pytest.raises(KeyboardInterrupt):
        run.supervisor.run(interrupted)
    assert not alive(seen[-1])


SUPERVISED = """
import sys
from pathlib import Path
from fedplat.supervisor import Program, Supervisor
folder, code = Path(sys.argv[1]), sys.argv[2]
programs = [Program(f"p{n}", [sys.executable, "-S", "-c", code], folder / f"p{n}.log") for n in range(3)]
Supervisor(programs, folder / "pids").run()
"""


@pytest.mark.parametrize("code", [SLEEP, STUBBORN], ids=["kind", "deaf"])
def test_no_program_outlives_a_supervisor_that_is_killed(code, tmp_path):
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(tmp_path), code], cwd=root)
    try:
        pids = tmp_path / "pids"
        wait(lambda: pids.exists() and pids.read_text().count("\n") == 3)
        children = [int(line.split()[1]) for line in pids.read_text().splitlines()]
        assert all(alive(pid) for pid in children)
    finally:
        parent.kill()
        parent.wait()
    wait(lambda: not any(alive(pid) for pid in children))


def test_a_program_that_is_not_there_is_named(program, tmp_path):
    run = Running([Program("none", ["/no/such/program"], tmp_path / "log")], tmp_path / "pids")
    with pytest.raises(JobError, match="/no/such/program: can't be started"):
        run.supervisor.look()
    run.supervisor.stop()


def test_one_program_that_can_not_be_started_ends_the_others(program, tmp_path):
    run = Running([program("one"), Program("none", ["/no/such/program"], tmp_path / "log")], tmp_path / "pids")
    noted: list[int] = []
    with pytest.raises(JobError):
        run.supervisor.run(lambda: noted.extend(run.processes().values()) or True)
    children = [child.process for child in run.supervisor._children if child.process is not None]
    assert children and all(process.poll() is not None for process in children)


def test_environment_folder_and_log_are_the_programs_own(running, program, tmp_path):
    code = "import os; print(os.environ['MINE'], os.getcwd(), flush=True); import time; time.sleep(600)"
    running(program("one", code, environment={"MINE": "yes"}, folder=tmp_path))
    wait(lambda: (tmp_path / "logs" / "one.log").read_text() == f"yes {tmp_path}\n")


def test_an_unknown_user_is_named_with_what_to_do(program):
    with pytest.raises(UsageError, match=r"no user 'nobody-here' on this machine.*useradd --system nobody-here"):
        account_of("nobody-here")
    supervisor = Supervisor([program("one", user="nobody-here")])
    with pytest.raises(UsageError, match="no user 'nobody-here'"):
        supervisor.look()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")
def test_a_program_runs_as_its_user_and_still_ends_with_its_parent(tmp_path):
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("this machine has no user 'nobody'")
    run = Running([Program("one", ["/bin/sleep", "600"], tmp_path / "log", user="nobody")], tmp_path / "pids")
    run.supervisor.look()
    pid = run.processes()["one"]
    status = Path(f"/proc/{pid}/status").read_text()
    run.supervisor.stop()
    assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}\t{nobody.pw_uid}" in status and not alive(pid)
