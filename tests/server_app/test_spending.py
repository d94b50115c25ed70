"""What a run says it has cost: every release is counted, none beyond the plan, and only in the run's own ledger."""

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedplat.errors import JobError, UsageError
from fedplat.events import (
    Event,
    PrivacySpent,
    Resumed,
    RoundFinished,
    RoundStarted,
    RunFinished,
    RunStarted,
    read_events,
)
from fedplat.rundir import RunDirectory
from privacy.ledger import Ledger
from privacy.plan import plan_privacy
from server_app.spending import ACCOUNT, RunBook, claim_of
from simulations.accounted_engine import open_simulation_ledger
from simulations.simulate import resume, simulate
from tests.server_app.test_client_level import names_of

UNITS = {
    "client": {"privacy__unit": "client"},
    "sample": {"privacy__unit": "sample", "privacy__sample_rate": 0.2, "local__steps": 1, "cohort__fraction": 1.0},
}
BANDED = {"privacy__sampling": "banded", "privacy__min_separation": 3, "cohort__size": 2}


@pytest.fixture
def private_job(tiny_job):
    """A small private job of either unit; keyword arguments as for `tiny_job`."""

    def make(unit="client", **settings):
        base = {
            "privacy__noise_multiplier": 1.0,
            "evaluation__server": False,
            "privacy__accountant": "rdp",
        }  # the quickest
        return tiny_job(**base | UNITS[unit] | settings)

    return make


def spent(run: RunDirectory) -> list[PrivacySpent]:
    return [event for event in read_events(run.events_file) if isinstance(event, PrivacySpent)]


def stop_after(kind: type, number: int, released: Counter):
    """A listener that counts released rounds, and presses Ctrl-C at the given event."""

    def listen(event: Event) -> None:
        if isinstance(event, RoundFinished):
            released[event.round] += 1
        if isinstance(event, kind) and event.round == number:
            raise KeyboardInterrupt

    return listen


def stopped(job, path, kind: type = RoundFinished, number: int = 2) -> RunDirectory:
    run = RunDirectory.create(path, job)
    with pytest.raises(KeyboardInterrupt):
        simulate(job, run, (stop_after(kind, number, Counter()),))
    return run


# --- releases are counted, whatever the sampling ----------------------------------------------------


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("sampling", [BANDED, {"privacy__sampling": "poisson"}], ids=["banded", "poisson"])
def test_rounds_repeated_after_crashes_are_counted_and_end_with_the_plan(sampling, spare, private_job, tmp_path):
    """Round 2 is released, and the run is killed before it is committed: again and again, until the plan is used up."""
    job = private_job(job__rounds=4, privacy__spare_rounds=spare, **sampling)
    run, released = RunDirectory.create(tmp_path / "run", job), Counter()
    bomb = stop_after(PrivacySpent, 2, released)
    with pytest.raises(KeyboardInterrupt):
        simulate(job, run, (bomb,))
    for _ in range(2 + spare):
        with pytest.raises(KeyboardInterrupt):
            resume(RunDirectory(run.path), (bomb,))
        assert spent(run)[-1].releases == released.total()
    assert released == {1: 1, 2: 3 + spare}
    assert released.total() == plan_privacy(job).releases
    assert spent(run)[-1].epsilon == pytest.approx(plan_privacy(job).epsilon(), abs=2e-3)
    with pytest.raises(JobError, match=rf"the plan's {4 + spare} releases .* are used up"):
        resume(RunDirectory(run.path), (bomb,))
    assert released.total() == plan_privacy(job).releases


def test_banded_noise_is_charged_once_however_often_the_run_goes_on(private_job, tmp_path):
    job = private_job(job__rounds=4, **BANDED)
    run = stopped(job, tmp_path / "run", RoundFinished, 3)
    resume(RunDirectory(run.path))
    plan = plan_privacy(job)
    with Ledger.open(run.ledger_file) as ledger:
        charges = [entry for entry in ledger.history(ACCOUNT) if entry.kind == "reserve"]
        balance = ledger.balance(ACCOUNT)
    assert Counter(entry.body["purpose"] for entry in charges) == {"job": 1, "train": 5}
    assert [entry.body["identity"]["round"] for entry in charges] == [0, 1, 2, 3, 3, 4]
    assert balance.spent_epsilon == pytest.approx(spent(run)[-1].epsilon, rel=0.1)  # PLD of RDP's
    assert {event.epsilon for event in spent(run)} == {plan.epsilon()}
    assert [event.releases for event in spent(run)] == [1, 2, 4, 5]


SAMPLINGS = {
    "poisson": ({"privacy__sampling": "poisson"}, "pld"),
    "fixed": ({"privacy__sampling": "fixed"}, "rdp"),
    "none": ({"privacy__sampling": "none"}, "pld"),
    "banded": (BANDED, "pld"),
}


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize(
    ("sampling", "adaptive"),
    [(s, a) for s in SAMPLINGS for a in (False, True) if (s, a) != ("banded", True)],  # that job is refused
)
def test_every_sampling_runs_and_names_whose_epsilon_it_is(sampling, adaptive, engine, private_job, simulated):
    settings, accountant = SAMPLINGS[sampling]
    extra = {"privacy__accountant": "pld"} | ({"privacy__adaptive": {}} if adaptive else {})
    job = private_job(simulation__engine=engine, privacy__noise_multiplier=2.0, **settings, **extra)
    run = simulated(job)
    plan = plan_privacy(job)
    assert any(isinstance(event, RunFinished) for event in read_events(run.events_file))
    assert [(event.round, event.releases) for event in spent(run)] == [(1, 1), (2, 2), (3, 3)]
    assert all((event.accountant, event.relation) == (accountant, plan.relation) for event in spent(run))
    epsilons = [event.epsilon for event in spent(run)]
    assert epsilons == sorted(epsilons) and epsilons[-1] == pytest.approx(plan.epsilon(3), abs=2e-3)


def test_a_job_without_an_epsilon_is_refused_before_its_first_round(private_job, tmp_path):
    job = private_job(privacy__sampling="fixed", privacy__accountant="prv")
    run = RunDirectory.create(tmp_path / "run", job)
    with pytest.raises(UsageError, match=r"no ε by prv.*another accountant"):
        simulate(job, run)
    events = read_events(run.events_file) if run.events_file.exists() else []
    assert not any(isinstance(event, RoundStarted) for event in events)


@pytest.mark.parametrize(("delta", "accountant"), [(1e-5, "pld"), (1e-12, "rdp")])
def test_a_delta_too_small_for_pld_is_accounted_by_rdp(delta, accountant, private_job):
    plan = plan_privacy(private_job(privacy__delta=delta, privacy__accountant="pld"))
    claim = claim_of(plan)
    assert claim.accountant == accountant
    assert claim.after(plan.releases) == pytest.approx(plan.epsilon(), abs=2e-3)


# --- a run that its releases stop -------------------------------------------------------------------

NO_GAIN = {"evaluation__server": True, "evaluation__patience": 1, "evaluation__min_delta": 10.0}
"""Stops after round 1: nothing is better than the first evaluation by that much."""


@pytest.mark.parametrize("unit", UNITS)
def test_a_run_that_its_releases_stop_has_cost_its_whole_plan(unit, private_job, simulated):
    job = private_job(unit, job__rounds=5, **NO_GAIN)
    run = simulated(job)
    plan, events = plan_privacy(run.job()), read_events(run.events_file)
    assert isinstance(events[-1], RunFinished) and (events[-1].reason, events[-1].round) == ("patience", 1)
    first, last = spent(run)
    assert (first.round, first.releases) == (1, 1)
    assert (last.round, last.releases, last.epsilon) == (1, plan.releases, plan.epsilon())
    assert last.epsilon > first.epsilon
    assert events[-2] == last


def test_a_run_of_all_its_rounds_claims_those_and_no_more(private_job, simulated):
    run = simulated(private_job(evaluation__server=True, evaluation__patience=5, evaluation__min_delta=10.0))
    assert [event.releases for event in spent(run)] == [1, 2, 3]


def test_a_run_that_is_good_enough_before_training_has_cost_nothing(private_job, simulated):
    run = simulated(private_job(evaluation__server=True, evaluation__target=0.0))
    assert spent(run) == []
    assert [e.reason for e in read_events(run.events_file) if isinstance(e, RunFinished)] == ["target"]


# --- a server that can't see its clients' ledgers ---------------------------------------------------


@pytest.mark.parametrize("on_failure", ["continue", "retry"])
@pytest.mark.parametrize("participations", [None, 4])
@pytest.mark.parametrize("spare", [0, 2])
def test_a_server_without_its_clients_ledgers_assumes_the_most(
    on_failure, participations, spare, private_job, tmp_path
):
    """A site refuses what its plan does not cover; up to there the server may have asked twice in every round."""
    settings = {"privacy__spare_rounds": spare, "cohort__on_failure": on_failure, "job__rounds": 10}
    if participations is not None:
        settings["privacy__participations"] = participations
    job = private_job("sample", **settings)
    plan, book = plan_privacy(job), RunBook(job, RunDirectory.create(tmp_path / "run", job))
    asked = 2 if on_failure == "retry" else 1
    for number in range(1, 11):
        event = book.spent(number, None)
        assert event.releases == min(asked * number + spare, plan.releases)
        assert event.epsilon == pytest.approx(plan.epsilon(event.releases), rel=1e-6)
        assert book.spent(number, 3).releases == 3
    assert event.releases == plan.releases


# --- the run's own ledger ---------------------------------------------------------------------------


def ledger_files(run: RunDirectory) -> list[Path]:
    return sorted(run.path.glob("ledger.sqlite*"))


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in paths:
        shutil.copy(path, folder)


def put_fresh_ledger(run: RunDirectory) -> None:
    """A ledger as a new run of the same job would make it."""
    for path in ledger_files(run):
        path.unlink()
    job = run.job()
    if job.privacy.unit == "client":
        RunBook(job, run).close()
    else:
        open_simulation_ledger(run.ledger_file, plan_privacy(job), names_of(job)).close()


@pytest.mark.parametrize("unit", UNITS)
def test_a_run_goes_on_with_its_own_ledger_only(unit, private_job, tmp_path):
    job = private_job(unit)
    run, other = stopped(job, tmp_path / "run"), stopped(job, tmp_path / "other")
    copy_files(ledger_files(run), tmp_path / "own")
    put_fresh_ledger(run)
    with pytest.raises(UsageError, match="is not the ledger that this run began with"):
        resume(RunDirectory(run.path))
    copy_files(ledger_files(other), run.path)
    with pytest.raises(UsageError, match="is not the ledger that this run began with"):
        resume(RunDirectory(run.path))
    copy_files((tmp_path / "own").iterdir(), run.path)
    resume(RunDirectory(run.path))
    assert [event.releases for event in spent(run)] == [1, 3, 4]  # round 2 was released twice


@pytest.mark.parametrize("unit", UNITS)
def test_the_ledger_is_asked_for_even_if_the_log_shows_no_round_any_more(unit, private_job, tmp_path):
    """Round 1 was released but not committed; a resume has undone it in the log, and was stopped there."""
    run = stopped(private_job(unit), tmp_path / "run", RoundFinished, 1)
    with pytest.raises(KeyboardInterrupt):
        resume(RunDirectory(run.path), (stop_after(Resumed, 0, Counter()),))
    assert not any(isinstance(event, RoundStarted) for event in read_events(run.events_file))
    for path in ledger_files(run):
        path.unlink()
    with pytest.raises(UsageError, match="its ledger is gone"):
        resume(RunDirectory(run.path))


def test_a_run_that_was_moved_goes_on(private_job, tmp_path):
    run = stopped(private_job(), tmp_path / "run")
    moved = RunDirectory(run.path.rename(tmp_path / "elsewhere"))
    resume(moved)
    assert isinstance(read_events(moved.events_file)[-1], RunFinished)


def test_a_run_without_privacy_has_no_ledger(tiny_job, simulated):
    (started,) = [e for e in read_events(simulated(tiny_job()).events_file) if isinstance(e, RunStarted)]
    assert started.ledger is None
