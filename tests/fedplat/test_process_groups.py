"""A program ends with everything that it forked: when it dies, when it is stopped, when the supervisor is killed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedplat import log_files, process_groups
from fedplat import supervisor as supervisors
from fedplat.process_groups import Known, kill_leftovers, members, write_known
from fedplat.supervisor import Program, Supervisor

ROOT = Path(__file__).parents[2]
FORKS = "import os, time; [os.fork() for _ in range(2)]; print(os.getpid(), flush=True); time.sleep(600)"
"""Four processes; three of them nobody waits for."""
SUPERVISED = """
import sys
from pathlib import Path
from fedplat.supervisor import Program, Supervisor
folder, code = Path(sys.argv[1]), sys.argv[2]
Supervisor([Program("forks", [sys.executable, "-S", "-c", code], folder / "log")], folder / "pids").run()
"""


def wait(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pid_in(folder: Path) -> int:
    path = folder / "pids"
    text = path.read_text() if path.exists() else ""
    return int(text.split()[1]) if text else 0


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor([Program("forks", [sys.executable, "-S", "-c", FORKS], tmp_path / "log")], tmp_path / "pids")
    made.look()
    wait(lambda: len(members(pid_in(tmp_path))) == 4)
    yield made
    made.stop()


def test_what_a_killed_program_had_forked_is_gone_before_the_next_one_starts(supervisor, tmp_path):
    before = pid_in(tmp_path)
    os.kill(before, signal.SIGKILL)

    def started_again() -> bool:
        supervisor.look()
        return pid_in(tmp_path) != before

    wait(started_again)
    assert members(before) == []
    wait(lambda: len(members(pid_in(tmp_path))) == 4)


def test_stop_leaves_nothing(supervisor, tmp_path):
    group = pid_in(tmp_path)
    supervisor.stop()
    assert members(group) == [] and not list(tmp_path.glob("pids*"))


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor that is a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED, str(tmp_path), FORKS], cwd=ROOT)
    try:
        wait(lambda: pid_in(tmp_path) and len(members(pid_in(tmp_path))) == 4)
        yield process
    finally:
        process.kill()
        process.wait()
        with_group = pid_in(tmp_path)
        if with_group:
            process_groups.wait_until_gone([with_group])


def test_nothing_outlives_a_killed_supervisor(killed, tmp_path):
    group = pid_in(tmp_path)
    killed.kill()
    wait(lambda: members(group) == [], 10)


def watchers(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            stat = (path.parent / "stat").read_text().rpartition(")")[2].split()
            if b"group_watcher" in path.read_bytes() and stat[1] == str(parent) and stat[0] != "Z":
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_killed_watcher_is_replaced_and_knows_what_runs(killed, tmp_path):
    group = pid_in(tmp_path)
    (first,) = watchers(killed.pid)
    os.kill(first, signal.SIGKILL)
    wait(lambda: watchers(killed.pid) and watchers(killed.pid) != [first])
    time.sleep(0.5)
    killed.kill()
    wait(lambda: members(group) == [], 10)


def test_if_the_watcher_died_with_it_the_next_start_ends_what_is_left(killed, tmp_path):
    group = pid_in(tmp_path)
    for pid in (*watchers(killed.pid), killed.pid):
        os.kill(pid, signal.SIGSTOP)  # both at once, as far as they can tell
    for pid in (*watchers(killed.pid), killed.pid):
        os.kill(pid, signal.SIGKILL)
    killed.wait()
    wait(lambda: group not in members(group))
    assert len(members(group)) == 3  # the program's first process ends with its parent, its children don't
    kill_leftovers(tmp_path / "pids.groups")
    assert members(group) == []


@pytest.mark.parametrize(
    "change", [{"started": "1"}, {"boot": "another"}, {"executable": "/bin/true"}, {"started": ""}]
)
def test_a_process_that_only_has_the_number_is_left_alone(change, tmp_path):
    stranger = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        wait(lambda: Known.of("x", stranger.pid).executable)
        write_known(tmp_path / "groups", [Known.of("x", stranger.pid)])
        noted = json.loads((tmp_path / "groups").read_text())
        (tmp_path / "groups").write_text(json.dumps(noted | change) + "\njunk\n[]\n")
        kill_leftovers(tmp_path / "groups")
        assert stranger.poll() is None
        write_known(tmp_path / "groups", [Known.of("x", stranger.pid)])
        kill_leftovers(tmp_path / "groups")
        assert stranger.wait(5) == -signal.SIGKILL
    finally:
        stranger.kill()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EMFILE])
def test_a_machine_that_is_full_for_a_while_does_not_end_the_supervisor(number, tmp_path, monkeypatch):
    made = Supervisor([Program("one", ["/bin/sleep", "600"], tmp_path / "log")], tmp_path / "pids")
    true = subprocess.Popen
    failing = [True]

    def popen(*arguments: object, **settings: object) -> object:
        if failing[0]:
            raise OSError(number, os.strerror(number))
        return true(*arguments, **settings)  # type: ignore[call-overload]

    monkeypatch.setattr(supervisors.subprocess, "Popen", popen)
    made.look()
    assert not (tmp_path / "pids").exists()
    failing[0] = False
    try:
        wait(lambda: made.look() or pid_in(tmp_path))
    finally:
        made.stop()


def test_a_pids_file_that_can_not_be_written_ends_nothing(tmp_path):
    (tmp_path / "pids").mkdir()
    made = Supervisor([Program("one", ["/bin/sleep", "600"], tmp_path / "log")], tmp_path / "pids")
    made.look()
    (group,) = made._known_groups()
    assert members(group) == [group]
    (tmp_path / "pids").rmdir()
    made.stop()


def test_logs_grow_to_a_limit_and_a_few_old_ones_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "LARGEST_LOG", 20_000)
    code = "import time\nfor n in range(10**9): print(f'{n:09d}', flush=True); n % 50 or time.sleep(0.01)"
    made = Supervisor([Program("one", [sys.executable, "-S", "-c", code], tmp_path / "log")])
    try:
        wait(lambda: made.look() or (tmp_path / "log.3").exists())
        first = (tmp_path / "log.3").read_bytes()
        wait(lambda: made.look() or (tmp_path / "log.3").read_bytes() != first)
    finally:
        made.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert all(path.stat().st_size < 2_000_000 for path in tmp_path.iterdir())
    assert b"\0" not in (tmp_path / "log").read_bytes()


def test_a_log_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "log").symlink_to(victim)
    made = Supervisor([Program("one", ["/bin/echo", "overwritten"], tmp_path / "log")])
    try:
        with pytest.raises(Exception, match="can't be started"):
            made.look()
    finally:
        made.stop()
    assert victim.read_text() == "mine"
