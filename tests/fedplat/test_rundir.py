"""The run directory: created once, driven by one process, found by path, id, prefix or `latest`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedplat.errors import UsageError
from fedplat.job import Job, default_job, validate_job
from fedplat.rundir import RunDirectory, find_run, list_runs, new_run_path, runs_root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setenv("FEDPLAT_RUNS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def make(root: Path, name: str, age: int = 0) -> RunDirectory:
    run = RunDirectory.create(root / name, default_job())
    os.utime(run.job_file, ns=(10**18 - age, 10**18 - age))
    return run


def test_job_is_read_back_from_its_run(root: Path) -> None:
    job = validate_job({"job": {"name": "mine", "seed": 7}, "task": {"args": {"ü": [1, "x"]}}}, "test")
    run = RunDirectory.create(root / "a", job)
    again = RunDirectory.open(run.path)
    assert again.job() == job
    assert again.job().digest == job.digest
    assert again.id == "a"
    assert run.checkpoints.is_dir()


def test_run_that_exists_is_never_touched(root: Path) -> None:
    run = make(root, "a")
    before = {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()}
    with pytest.raises(UsageError, match=r"exists already\. Choose another --out.*fedplat resume"):
        RunDirectory.create(run.path, Job())
    assert {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()} == before
    assert run.job() == default_job()


def test_run_of_a_private_job_is_for_its_owner_only(root: Path) -> None:
    """Checkpoints of banded noise hold noise that can be taken off the model, and the log names secret cohorts."""
    private = validate_job({"privacy": {"unit": "client", "noise_multiplier": 1.0}}, "test")
    before = os.umask(0o022)
    try:
        secret, public = RunDirectory.create(root / "secret", private), make(root, "public")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (secret.path, secret.checkpoints)] == [0o700, 0o700]
    assert [path.stat().st_mode & 0o777 for path in (public.path, public.checkpoints)] == [0o755, 0o755]
    assert root.stat().st_mode & 0o777 == 0o755


def test_run_that_can_not_be_created_is_a_usage_error(root: Path) -> None:
    root.parent.joinpath("file").write_text("x")
    with pytest.raises(UsageError, match="can't be created"):
        RunDirectory.create(root.parent / "file" / "run", Job())


def test_folder_without_a_job_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no job\.toml.*fedplat runs list"):
        RunDirectory.open(tmp_path)


HOLDER = """
import sys
from pathlib import Path
from fedplat.rundir import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.readline()
print("released", flush=True)
sys.stdin.read()
"""


def hold(run: RunDirectory) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def assert_refused(run: RunDirectory) -> None:
    with pytest.raises(UsageError, match="another process is driving this run"), RunDirectory.open(run.path).locked():
        pass


def test_lock_excludes_a_second_process_until_the_first_is_killed(root: Path) -> None:
    run = make(root, "a")
    holder = hold(run)
    try:
        assert_refused(run)
        assert_refused(run)  # a refused attempt doesn't break the lock of the other
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with RunDirectory.open(run.path).locked():
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_lock_ends_with_its_block_and_not_only_with_the_process(root: Path) -> None:
    run = make(root, "a")
    holder = hold(run)
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write("go on\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "released\n"
        with run.locked():
            assert_refused(run)
    finally:
        holder.communicate("")


def test_runs_can_be_driven_side_by_side(root: Path) -> None:
    holder = hold(make(root, "a"))
    try:
        with make(root, "b").locked():
            assert (root / "b" / "job.toml").is_file()
    finally:
        holder.communicate("")


def test_run_is_found_by_path_id_prefix_and_latest(root: Path) -> None:
    make(root, "digits-20240101-aaaa", age=1)
    make(root, "digits-20240202-bbbb", age=5)
    make(root, "cancer", age=9)
    assert find_run("digits-20240101-aaaa").id == "digits-20240101-aaaa"
    assert find_run("digits-202402").id == "digits-20240202-bbbb"
    assert find_run("c").id == "cancer"
    assert find_run(str(root / "cancer")).id == "cancer"
    assert find_run("runs/cancer").id == "cancer"
    assert find_run("latest").id == "digits-20240101-aaaa"
    assert [run.id for run in list_runs()] == ["cancer", "digits-20240202-bbbb", "digits-20240101-aaaa"]


def test_exact_id_wins_over_longer_ones(root: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        make(root, name)
    assert find_run("run").id == "run"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("run-", "matches several runs"),
        ("other", "no such run"),
        ("./run-1/nothing", "not a fedplat run directory"),
        ("/no/such/place", "not a fedplat run directory"),
    ],
)
def test_reference_that_means_no_single_run_is_refused(root: Path, reference: str, message: str) -> None:
    make(root, "run-1")
    make(root, "run-2")
    with pytest.raises(UsageError, match=f"{message}.*fedplat runs list"):
        find_run(reference)


def test_latest_of_no_runs_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="no such run"):
        find_run("latest")
    assert list_runs() == []


def test_folders_without_a_job_are_not_listed(root: Path) -> None:
    make(root, "run")
    (root / "junk").mkdir()
    (root / "file").write_text("x")
    assert [run.id for run in list_runs()] == ["run"]


def test_new_paths_start_with_the_jobs_name_and_never_collide(root: Path) -> None:
    paths = {new_run_path(default_job()) for _ in range(20)}
    assert len(paths) == 20
    assert all(path.parent == root == runs_root() for path in paths)
    assert all(path.name.startswith("digits-demo-") for path in paths)
    assert new_run_path(default_job(), Path("/else")).parent == Path("/else")
