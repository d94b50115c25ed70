"""The simulation's own ledger: charged before a client trains, never refunded, the same after a resume."""

import pytest

from fedplat.errors import UsageError
from fedplat.events import ClientFailed, Event, PrivacySpent, RoundFinished, RoundStarted, read_events
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from privacy.ledger import Ledger
from privacy.plan import plan_privacy
from server_app.cohort import sample_cohort
from simulations.accounted_engine import SITE, open_simulation_ledger
from simulations.engine import SerialEngine
from simulations.simulate import resume, simulate

ALL = {"cohort__fraction": 1.0, "cohort__clients": 4}


@pytest.fixture
def private_job(tiny_job):
    def make(**settings: object) -> Job:
        privacy = {"unit": "sample", "noise_multiplier": 1.0, "sample_rate": 0.2, "clip_norm": 0.5}
        return tiny_job(**({"local__steps": 1} | {f"privacy__{k}": v for k, v in privacy.items()} | settings))

    return make


def ledger_of(run: RunDirectory) -> Ledger:
    return Ledger.open(run.ledger_file, SITE)


def charged(run: RunDirectory) -> dict[str, int]:
    with ledger_of(run) as ledger:
        return {balance.account: balance.releases for balance in ledger.balances() if balance.releases}


def outcomes(run: RunDirectory) -> list[str]:
    with ledger_of(run) as ledger:
        entries = [entry for account in ledger.accounts() for entry in ledger.history(account)]
    return sorted(entry.body["outcome"] for entry in entries if entry.kind == "commit")


def spent(run: RunDirectory) -> list[PrivacySpent]:
    return [event for event in read_events(run.events_file) if isinstance(event, PrivacySpent)]


@pytest.mark.parametrize("engine", ["serial", "vector", "process"])
def test_every_client_is_charged_for_the_rounds_it_was_asked(engine, private_job, simulated):
    job = private_job(job__rounds=4, simulation__engine=engine, simulation__workers=1)
    run = simulated(job)
    names = [f"client-{i}" for i in range(6)]
    asked = [name for n in range(1, 5) for name in sample_cohort(names, job.cohort.cohort_size, 0, "cohort", n)]
    assert charged(run) == {name: asked.count(name) for name in set(asked)}
    assert outcomes(run) == ["released"] * len(asked)
    with ledger_of(run) as ledger:
        ledger.verify()
        most = max(ledger.balances(), key=lambda balance: balance.spent_epsilon)
    assert spent(run)[-1].epsilon == pytest.approx(most.spent_epsilon, rel=1e-3)
    assert spent(run)[-1].releases == most.releases


class Spy(SerialEngine):
    """Looks into the ledger file when it gets a round's requests, and when a client is about to train."""

    def __init__(self, app, path) -> None:
        super().__init__(app)
        self.path, self.seen = path, []

    def _look(self, deliveries) -> None:
        with Ledger.open(self.path, SITE, readonly=True) as ledger:
            for delivery in deliveries:
                name = f"client-{delivery.context.node_config['partition-id']}"
                if delivery.message.metadata.message_type == "train":
                    self.seen.append((name, ledger.balance(name).releases))

    def submit(self, deliveries):
        self._look(deliveries)
        super().submit(deliveries)

    def collect(self):
        self._look(list(self._queue)[:1])
        return super().collect()


def test_the_reservation_is_on_disk_before_a_client_trains(private_job, tmp_path, monkeypatch):
    job, run = private_job(job__rounds=2, **ALL), RunDirectory(tmp_path / "run")
    spies = []

    def spying(app):
        spies.append(Spy(app, run.ledger_file))
        return spies[-1]

    monkeypatch.setattr("simulations.choose.SerialEngine", spying)
    simulate(job, RunDirectory.create(run.path, job))
    seen = spies[0].seen  # each round: four requests submitted, four clients trained
    for number in (1, 2):
        assert sorted(seen[8 * number - 8 : 8 * number]) == sorted([(f"client-{i}", number) for i in range(4)] * 2)


@pytest.mark.parametrize("fault", ["fail", "drop", "late", "nan"])
def test_a_client_that_fails_stays_charged(fault, private_job, simulated):
    job = private_job(job__rounds=3, simulation__faults={fault: 0.5}, cohort__on_shortfall="skip", **ALL)
    run = simulated(job)
    assert charged(run) == {f"client-{i}": 3 for i in range(4)}
    failed = [event for event in read_events(run.events_file) if isinstance(event, ClientFailed)]
    assert failed
    expected = {"fail": len(failed), "drop": 0, "late": 0, "nan": 0}[fault]
    assert outcomes(run).count("failed") == expected
    assert outcomes(run).count("released") == 12 - (0 if fault == "nan" else len(failed))
    assert spent(run)[-1].releases == 3


def test_a_retry_is_a_new_spend(private_job, simulated):
    job = private_job(job__rounds=2, simulation__faults={"fail": 0.5}, cohort__on_failure="retry",
                      cohort__on_shortfall="skip", **ALL)  # fmt: skip
    run = simulated(job)
    counts = charged(run)
    with ledger_of(run) as ledger:
        identities = [e.body["identity"] for a in ledger.accounts() for e in ledger.history(a) if e.kind == "reserve"]
    retries = [one for one in identities if one["attempt"] > 1]
    assert retries and sum(counts.values()) == 8 + len(retries)
    assert spent(run)[-1].releases == max(counts.values())


def test_a_client_whose_releases_are_used_up_is_refused_and_the_run_goes_on(private_job, simulated):
    """One participation and one spare round, four rounds: two trainings each, then polite refusals."""
    job = private_job(job__rounds=4, privacy__participations=1, privacy__spare_rounds=1, cohort__on_shortfall="skip",
                      **ALL)  # fmt: skip
    run = simulated(job)
    assert charged(run) == {f"client-{i}": 2 for i in range(4)}
    finished = [event for event in read_events(run.events_file) if isinstance(event, RoundFinished)]
    assert [event.round for event in finished] == [1, 2, 3, 4]
    failed = [event for event in read_events(run.events_file) if isinstance(event, ClientFailed)]
    assert len(failed) == 8 and all("privacy" in event.reason for event in failed)
    plan = plan_privacy(job)
    assert spent(run)[-1].epsilon == pytest.approx(plan.epsilon(), rel=1e-3)


def stopped(job: Job, run: RunDirectory, kind: type, number: int) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, kind) and event.round == number:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job, run, (listen,))


@pytest.mark.parametrize("kind", [RoundStarted, RoundFinished])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_resumed_run_continues_its_ledger_and_epsilon_never_falls(kind, evaluates, private_job, tmp_path):
    extra = {"evaluation__clients": 1.0, "privacy__evaluation_noise": 5.0, "data__holdout": 0.2} if evaluates else {}
    job = private_job(job__rounds=4, **ALL, **extra)
    run = RunDirectory.create(tmp_path / "run", job)
    stopped(job, run, kind, 3)
    before, first = charged(run), spent(run)
    resume(RunDirectory(run.path))
    repeated = 1 if kind is RoundFinished else 0  # round 3 was trained but not committed: it is trained again
    per_round = 2 if evaluates else 1
    assert all(charged(run)[name] > count for name, count in before.items())
    assert charged(run) == {f"client-{i}": 4 * per_round + repeated for i in range(4)}
    history = [event.epsilon for event in spent(run)]
    assert history == sorted(history) and history[-1] > first[-1].epsilon
    assert spent(run)[-1].releases == 4 + repeated
    with ledger_of(run) as ledger:
        ledger.verify()
    assert [path.name for path in run.path.rglob("*.sqlite")] == ["ledger.sqlite"]


def test_two_runs_have_two_ledgers(private_job, simulated):
    job = private_job(job__rounds=1, **ALL)
    one, other = simulated(job, "one"), simulated(job, "other")
    assert charged(one) == charged(other) == {f"client-{i}": 1 for i in range(4)}
    with ledger_of(one) as first, ledger_of(other) as second:
        assert first.identity != second.identity


def test_insecure_noise_is_written_into_ledger_and_events(private_job, simulated):
    run = simulated(private_job(job__rounds=1, privacy__insecure_noise=True, **ALL))
    with ledger_of(run) as ledger:
        assert all(balance.insecure_releases == balance.releases == 1 for balance in ledger.balances())
    assert spent(run)[-1].insecure_noise


def test_a_ledger_of_something_else_is_refused(private_job, tmp_path):
    Ledger.create(tmp_path / "ledger.sqlite", "hospital").close()
    plan = plan_privacy(private_job())
    with pytest.raises(UsageError, match="is the ledger of site 'hospital'"):
        open_simulation_ledger(tmp_path / "ledger.sqlite", plan, ["client-0"])


def test_a_client_with_one_example_is_refused_and_not_charged(private_job, simulated, tmp_path):
    (tmp_path / "lists.json").write_text(str([[0], list(range(1, 1438))]))
    job = private_job(job__rounds=1, data__partition={"kind": "explicit", "file": str(tmp_path / "lists.json")},
                      cohort__clients=2, cohort__fraction=1.0)  # fmt: skip
    run = simulated(job)
    assert charged(run) == {"client-1": 1}
    (failed,) = [event for event in read_events(run.events_file) if isinstance(event, ClientFailed)]
    assert failed.client == "client-0" and "at least 2 examples" in failed.reason
