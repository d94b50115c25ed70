"""Real processes, real signals: Ctrl-C is clean, SIGKILL at any moment loses nothing, a full disk is survived."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = [
    "--set", "job.rounds=25", "--set", "cohort.clients=20", "--set", "cohort.fraction=0.5",
    "--set", "server.strategy=FedAdam", "--set", "server.args.eta=0.05", "--set", "task.args.hidden=16",
    "--engine", "serial",
]  # fmt: skip


def fedplat(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fedplat", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_round(run: Path, number: int, process: subprocess.Popen) -> None:
    log = run / "events.jsonl"
    while not (log.exists() and f'"event":"round_started","round":{number},' in log.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> str:
    """The model of a run that was never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, out, err = finish(fedplat("simulate", *JOB, "--json", "--out", str(run)))
    assert code == 0, err
    return json.loads(out.splitlines()[-1])["model_sha256"]


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_moments_ends_with_the_same_bits(seed, whole, tmp_path):
    rng = random.Random(seed)
    run = tmp_path / "run"
    process = fedplat("simulate", *JOB, "--out", str(run))
    for _ in range(2):
        log = run / "events.jsonl"
        so_far = log.read_text().count("round_started") if log.exists() else 0
        wait_for_round(run, min(25, so_far + rng.randint(1, 10)), process)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = fedplat("resume", str(run), "--json")
    code, out, err = finish(process)
    if "already finished" in err:  # the last kill came after the end
        return
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["model_sha256"] == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_resume(number, whole, tmp_path):
    run = tmp_path / "run"
    process = fedplat("simulate", *JOB, "--out", str(run))
    wait_for_round(run, 5, process)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 130 and f"fedplat resume {run}" in err and "Traceback" not in err
    assert '"interrupted"' in (run / "events.jsonl").read_text()
    code, out, err = finish(fedplat("resume", str(run), "--json"))
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["model_sha256"] == whole


def test_two_processes_cannot_drive_one_run(tmp_path):
    run = tmp_path / "run"
    process = fedplat("simulate", *JOB, "--out", str(run))
    wait_for_round(run, 1, process)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        code, _, err = finish(fedplat("resume", str(run)))
        assert code == 2 and "another process is driving this run" in err
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.communicate()


def test_no_room_for_a_checkpoint_is_survived(tmp_path):
    run = tmp_path / "run"
    big = ["--set", "task.args.hidden=400", "--set", "job.rounds=3", "--set", "cohort.clients=4", "--engine", "serial"]

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    code, _, err = finish(fedplat("simulate", *big, "--out", str(run), preexec_fn=little_room))
    assert code == 1 and "could not be written" in err and f"fedplat resume {run}" in err
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.endswith(".part")]
    code, out, err = finish(fedplat("resume", str(run), "--json"))
    assert code == 0, err
    whole = finish(fedplat("simulate", *big, "--json", "--out", str(tmp_path / "whole")))[1]
    assert json.loads(out.splitlines()[-1])["model_sha256"] == json.loads(whole.splitlines()[-1])["model_sha256"]
