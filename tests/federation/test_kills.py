"""SIGKILL of any process at any moment: the run ends with the same bits, and nobody pays twice for one release.

How many kills: $FEDPLAT_KILLS (default 12, CI's share; 100 were run by hand, see docs/federation.md).
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from client_app.audit_log import read_audit
from fedplat.cli.operator import ready_for_sites, sign
from fedplat.consortium.signed_job import SignedJob
from fedplat.errors import JobError
from fedplat.events import PrivacySpent, RoundFinished, RunFinished, read_events
from fedplat.job import Job
from fedplat.rundir import RunDirectory, list_runs
from privacy.site_budgets import load_site, open_site_ledger
from simulations.local_federation import LocalFederation
from tests.federation.requirements import needs_nginx

KILLS = int(os.environ.get("FEDPLAT_KILLS", "12"))
KILLS_PER_RUN = 3
DEADLINE_S = 240.0
TARGETS = [("server", name) for name in ("superlink", "front", "executor")] + [
    (f"site-{number}", name) for number in (1, 2) for name in ("link", "supernode", "agent")
]


def run_of(federation: LocalFederation, job: Job) -> RunDirectory | None:
    found = [run for run in list_runs(federation.server.runs_folder) if run.job().digest == job.digest]
    assert len(found) <= 1, "a run was begun twice"
    return found[0] if found else None


def is_finished(run: RunDirectory | None) -> bool:
    if run is None or not run.events_file.exists():
        return False
    return any(isinstance(event, RunFinished) for event in read_events(run.events_file))


def kill(federation: LocalFederation, party: str, program: str) -> bool:
    number = federation.process_id(party, program)
    if number is None:
        return False
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def drive(federation: LocalFederation, job: Job, chance: random.Random) -> tuple[RunDirectory, int]:
    """Submit a job, kill what chance says, and wait for its end."""
    with federation.control() as control:
        control.start_run(sign(job, federation.operator))
    started, kills = time.monotonic(), 0
    moments = sorted(chance.uniform(0.0, 6.0) for _ in range(KILLS_PER_RUN))
    while True:
        run = run_of(federation, job)
        if is_finished(run):
            assert run is not None
            require_reported(federation, job)
            return run, kills
        if moments and time.monotonic() - started >= moments[0]:
            moments.pop(0)
            kills += kill(federation, *chance.choice(TARGETS))
        assert time.monotonic() - started < DEADLINE_S, f"no end; logs: {federation.folder}"
        time.sleep(0.05)


def require_reported(federation: LocalFederation, job: Job) -> None:
    """Flower says of the newest run of this job that it was completed, once whoever was killed is back."""
    deadline, status = time.monotonic() + 90, ""
    while time.monotonic() < deadline:
        with contextlib.suppress(JobError), federation.control() as control:
            mine = [run for run in control.runs() if Job.from_canonical(SignedJob.parse(run.job).job) == job]
            status = mine[-1].status
            if status == "finished:completed":
                return
        time.sleep(0.5)
    raise AssertionError(f"the run is finished, and Flower says {status}")


@pytest.mark.slow
@needs_nginx
def test_killed_at_random_moments_a_run_ends_with_the_same_bits_and_one_spend_per_round(
    tmp_path: Path, tiny_job, simulated
):
    chance, kills, number = random.Random(20261118), 0, 0
    with LocalFederation(tmp_path / "f", sites=2, environment={"OMP_NUM_THREADS": "1"}) as federation:
        federation.wait_until_online()
        while kills < KILLS:
            number += 1
            private = {"unit": "sample", "noise_multiplier": 4.0, "sample_rate": 0.05, "delta": 1e-5}
            extra = {f"privacy__{key}": value for key, value in private.items()} if number % 2 else {}
            settings = {"cohort__clients": 2, "cohort__fraction": 1.0, "job__rounds": 4, "job__seed": number}
            if extra:
                settings["local__steps"] = 2
            job = ready_for_sites(tiny_job(**settings, **extra), federation.operator)
            run, done = drive(federation, job, chance)
            kills += done
            require_invariants(federation, job, run)
            if not extra:
                virtual = simulated(tiny_job(**settings), f"virtual-{number}")
                assert run.model_file.read_bytes() == virtual.model_file.read_bytes()
            print(f"{kills} kills, {number} runs")


def require_invariants(federation: LocalFederation, job: Job, run: RunDirectory) -> None:
    events = read_events(run.events_file)
    rounds = [event for event in events if isinstance(event, RoundFinished)]
    assert [event.round for event in rounds] == list(range(1, job.job.rounds + 1))
    assert all(event.accepted == 2 for event in rounds), "a site was left out"
    for name in federation.names:
        kit = federation.site(name)
        read_audit(kit.state_folder / "audit.jsonl")
        with open_site_ledger(load_site(kit.site_file)) as ledger:
            ledger.verify()
            if job.privacy is None:
                continue
            entries = [e for e in ledger.history("demo/sample") if e.body.get("identity", {}).get("job") == job.digest]
            assert [e.body["identity"]["round"] for e in entries] == list(range(1, job.job.rounds + 1))
    if job.privacy is not None:
        assert any(isinstance(event, PrivacySpent) for event in events)
