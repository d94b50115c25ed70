"""An operator's and an administrator's day, through the command line, on real processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedplat.cli.operator import ready_for_sites, sign
from fedplat.consortium.kits import provision
from fedplat.consortium.spec import ConsortiumSection, ConsortiumSpec, PartySection, ServerSection
from fedplat.events import ClientFailed, RunFinished, read_events
from fedplat.rundir import RunDirectory, list_runs
from simulations.local_federation import OPERATOR, LocalFederation
from tests.federation.requirements import needs_nginx

pytestmark = [pytest.mark.slow, needs_nginx]
PRIVATE = {"privacy__unit": "sample", "privacy__noise_multiplier": 4.0, "privacy__sample_rate": 0.05,
           "privacy__delta": 1e-5, "local__steps": 2}  # fmt: skip


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(folder, sites=2, environment={"OMP_NUM_THREADS": "1"}) as started:
        started.wait_until_online()
        yield started


def fedplat(federation: LocalFederation, *arguments: str, code: int = 0) -> str:
    """Run a command as the operator; returns stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "fedplat", *arguments, "--kit", str(federation.operator.folder)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@pytest.fixture
def job_file(tmp_path: Path, tiny_job):
    def write(**settings: object) -> Path:
        common = {"cohort__clients": 2, "cohort__fraction": 1.0, "cohort__deadline_s": 60.0}
        path = tmp_path / f"job-{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(tiny_job(**(common | settings)).to_toml())
        return path

    return write


def newest(federation: LocalFederation) -> RunDirectory:
    return list_runs(federation.server.runs_folder)[-1]


def wait_for(condition, deadline_s: float = 120.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_submit_follow_status_logs_sites(federation, job_file, simulated, tiny_job):
    path = job_file(job__seed=11)
    dry = json.loads(fedplat(federation, "submit", str(path), "--dry-run", "--json").splitlines()[-1])
    assert dry == {"considered": {"site-1": "accepts", "site-2": "accepts"}}
    assert not list_runs(federation.server.runs_folder), "a dry run trains nothing"
    told = json.loads(fedplat(federation, "submit", str(path), "--follow", "--json").splitlines()[-1])
    run = newest(federation)
    assert run.job().digest == told["job"]
    virtual = simulated(tiny_job(cohort__clients=2, cohort__fraction=1.0, job__seed=11))
    assert run.model_file.read_bytes() == virtual.model_file.read_bytes()
    (row,) = (r for r in json.loads(fedplat(federation, "status", "--json")) if r["run"] == told["run"])
    assert (row["status"], row["round"], row["directory"]) == ("finished:completed", 3, run.id)
    assert "finished after round 3" in fedplat(federation, "logs", told["run"])
    rows = json.loads(fedplat(federation, "sites", "--json"))
    assert [(r["site"], r["status"]) for r in rows] == [("site-1", "online"), ("site-2", "online")]


def test_a_refusing_site_shows_in_a_dry_run(federation, job_file):
    path = job_file(task__name="cancer", task__args={})
    told = fedplat(federation, "submit", str(path), "--dry-run", code=1)
    assert "no dataset" in told


def test_a_job_for_other_sites_is_refused_before_anything_is_sent(federation, job_file):
    assert "the consortium has 2 sites" in fedplat(federation, "submit", str(job_file(cohort__clients=5)), code=2)


def test_a_stopped_run_is_resumed_to_the_same_bits(federation, job_file, simulated, tiny_job):
    path = job_file(job__seed=12, job__rounds=12)
    told = json.loads(fedplat(federation, "submit", str(path), "--json").splitlines()[-1])
    runs = federation.server.runs_folder
    wait_for(lambda: bool(list_runs(runs)) and newest(federation).job().job.seed == 12)
    run = newest(federation)
    wait_for(lambda: any((run.checkpoints).iterdir()))
    fedplat(federation, "stop", told["run"])
    time.sleep(3)
    assert not any(isinstance(event, RunFinished) for event in read_events(run.events_file))
    fedplat(federation, "resume", told["run"])
    wait_for(lambda: any(isinstance(event, RunFinished) for event in read_events(run.events_file)))
    virtual = simulated(tiny_job(cohort__clients=2, cohort__fraction=1.0, job__seed=12, job__rounds=12))
    assert run.model_file.read_bytes() == virtual.model_file.read_bytes()


def run_private(federation, tiny_job, seed: int) -> list[object]:
    settings = {"cohort__clients": 2, "cohort__fraction": 1.0, "job__rounds": 2, "job__seed": seed, **PRIVATE}
    job = ready_for_sites(tiny_job(**settings), federation.operator)
    with federation.control() as control:
        control.start_run(sign(job, federation.operator))

    def done() -> bool:
        found = [run for run in list_runs(federation.server.runs_folder) if run.job().digest == job.digest]
        return (
            bool(found)
            and found[0].events_file.exists()
            and any(isinstance(event, RunFinished) for event in read_events(found[0].events_file))
        )

    wait_for(done)
    (run,) = (run for run in list_runs(federation.server.runs_folder) if run.job().digest == job.digest)
    return list(read_events(run.events_file))


def test_a_restored_backup_of_the_ledger_is_refused(federation, tiny_job, tmp_path):
    kit = federation.site("site-1")
    files = [kit.folder / "ledger.sqlite", kit.folder / "ledger.sqlite.counter", kit.state_folder / "heads.json"]
    run_private(federation, tiny_job, 21)
    federation.end("site-1")
    kept = [path for path in files if path.exists()]
    for path in kept:  # everything that could tell, the site's own memory of heads included
        shutil.copy(path, tmp_path / path.name)
    federation.start("site-1")
    federation.wait_until_online()
    run_private(federation, tiny_job, 22)
    federation.end("site-1")
    for path in kit.folder.glob("ledger.sqlite-*"):
        path.unlink()
    for path in kept:
        shutil.copy(tmp_path / path.name, path)
    federation.start("site-1")
    federation.wait_until_online()
    events = run_private(federation, tiny_job, 23)
    refusals = [e for e in events if isinstance(e, ClientFailed)]
    assert refusals and all(e.client == "client-0" and "restored backup" in e.reason for e in refusals), refusals


def test_a_revoked_operator_is_shut_out_at_the_front_and_at_the_sites(federation, tiny_job):
    """Last in this module: the operator is gone afterwards."""
    settings = {"cohort__clients": 2, "cohort__fraction": 1.0, "job__seed": 31}
    job = ready_for_sites(tiny_job(**settings), federation.operator)
    signed = sign(job, federation.operator)
    server = federation.server
    spec = ConsortiumSpec(
        consortium=ConsortiumSection(name="demo"),
        server=ServerSection(host=server.host, port=server.port),
        sites=tuple(PartySection(name=name) for name in federation.names),
        operators=(PartySection(name=OPERATOR), PartySection(name="second")),
    )
    provision(spec, federation.kits, lambda name: "", revoke=[OPERATOR])
    time.sleep(2)
    assert "refused (403)" in fedplat(federation, "status", code=2)
    shutil.move(federation.operator.folder, federation.folder / "revoked")
    second = federation.kits / "operators" / "second"
    done = subprocess.run(
        [sys.executable, "-m", "fedplat", "sites", "--kit", str(second), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    from fedplat.consortium.kit_files import OperatorKit
    from fedplat.flower.control import Control, Credentials

    kit = OperatorKit.load(second)
    with Control(kit.server, Credentials(kit.certificate, kit.key, kit.ca).context()) as control:
        run_id = control.start_run(signed)  # somebody with access submits what the revoked one has signed
        wait_for(lambda: control.runs(run_id)[0].status.startswith("finished"))
        assert control.runs(run_id)[0].status == "finished:failed"
    assert not any(run.job().digest == job.digest for run in list_runs(server.runs_folder))


def test_processes_end_with_their_supervisor(federation):
    pids = [federation.process_id("site-2", name) for name in ("link", "supernode", "agent")]
    federation.end("site-2", signal.SIGKILL)
    wait_for(lambda: not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids), 20)
