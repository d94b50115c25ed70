"""Spend before release, at a site with a real ledger: no budget, no computation; nothing comes back by failing."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from scipy import stats
from torch import Tensor

from client_app import handler as handlers
from client_app.handler import handle_admit, handle_evaluate, handle_train, handler_for
from fedplat import wire
from fedplat.errors import JobError, UsageError
from fedplat.flower import become_server, new_context, stamp
from fedplat.job import Job
from fedplat.model import read_arrays
from fedplat.task import Examples, Split
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity
from privacy.ledger import BudgetExceeded, Ledger, LedgerTampered
from privacy.site_budgets import ENVIRONMENT, create_site_ledger, load_site

TASK = f"{__name__}:Counted"


class Counted(Digits):
    """Counts how often its data is looked at; may fail."""

    looks = 0
    fails = False
    rows: int | None = None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        type(self).looks += 1
        if type(self).fails:
            raise RuntimeError("disk on fire")
        return super().loss(outputs, targets)

    def data(self, split: Split) -> Examples:
        return super().data(split)[slice(type(self).rows)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(Counted, "looks", 0)
    monkeypatch.setattr(Counted, "fails", False)
    monkeypatch.setattr(handlers, "_warm", {})
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def private_job(tiny_job):
    def make(**settings: object) -> Job:
        privacy = {"unit": "sample", "noise_multiplier": 2.0, "sample_rate": 0.2}
        defaults = {"task__name": TASK, "job__rounds": 50, "privacy__delta": 1e-6}
        return tiny_job(**(defaults | {f"privacy__{key}": value for key, value in privacy.items()} | settings))

    return make


class AtSite:
    """A site of its own: a site file, a ledger, and one client that is no virtual one."""

    def __init__(self, folder: Path, monkeypatch, **dataset: object) -> None:
        terms = {"tasks": [TASK], "unit": "sample", "relation": "add-remove", "epsilon": 3.0, "delta": 1e-5} | dataset
        lines = [
            f"{key} = {str(value).lower() if isinstance(value, bool) else value!r}" for key, value in terms.items()
        ]
        self.file = folder / "site.toml"
        self.file.write_text("\n".join(["[site]", "name = 'hospital'", "[datasets.digits]", *lines]))
        self.site = load_site(self.file)
        create_site_ledger(self.site)
        monkeypatch.setenv(ENVIRONMENT, str(self.file))
        self.account = f"digits/{terms['unit']}"

    def spent(self) -> tuple[int, float, float]:
        """Releases, ε spent, and the part of it that is only reserved; from a ledger that is opened anew."""
        with Ledger.open(self.site.ledger, "hospital", counter=self.site.counter) as ledger:
            if self.account not in ledger.accounts():
                return 0, 0.0, 0.0
            balance = ledger.balance(self.account)
            return balance.releases, balance.spent_epsilon, balance.reserved_epsilon


@pytest.fixture
def at_site(tmp_path, monkeypatch):
    return lambda **dataset: AtSite(tmp_path, monkeypatch, **dataset)


HANDLE = {"train": handle_train, "evaluate": handle_evaluate, "query.admit": handle_admit}


def ask(job: Job, number: int = 1, attempt: int = 0, client: int = 0, kind: str = "train", **node: object) -> Message:
    content = RecordDict({wire.CONFIG: Identity(job.digest, number, attempt).record()})
    content[wire.ARRAYS] = wire.encode_arrays(read_arrays(handler_for(job.canonical(), f"client-{client}").state))
    become_server(7)
    message = Message(content, dst_node_id=100, message_type=kind)
    stamp(message)
    context = new_context(7, 100, {"partition-id": client, **node}, {wire.JOB_KEY: job.canonical()})
    Counted.looks = 0  # what the model's rehearsal looked at was no client's
    return HANDLE[kind](message, context)


def admit(job: Job, **node: object) -> Message:
    return ask(job, 0, kind="query.admit", **node)


def test_without_a_site_file_nothing_is_computed(private_job):
    with pytest.raises(UsageError, match=r"\$FEDPLAT_SITE names no site file"):
        ask(private_job())
    assert Counted.looks == 0


def test_a_server_can_not_say_that_a_site_is_simulated(private_job, at_site):
    """The mark is in the node's own config; in a request or a run config it means nothing."""
    site, job = at_site(), private_job()
    content = RecordDict({wire.CONFIG: Identity(job.digest, 1, 0).record()})
    content[wire.ARRAYS] = wire.encode_arrays(read_arrays(handler_for(job.canonical()).state))
    content.config_records[wire.CONFIG][wire.SIMULATED] = True
    become_server(7)
    message = Message(content, dst_node_id=100, message_type="train")
    stamp(message)
    run_config = {wire.JOB_KEY: job.canonical(), wire.SIMULATED: True}
    handle_train(message, new_context(7, 100, {"partition-id": 0}, run_config))
    assert site.spent()[0] == 1


def test_as_many_rounds_as_the_budget_covers_and_not_one_more(private_job, at_site):
    site, job = at_site(epsilon=2.0), private_job()
    done = 0
    with pytest.raises(BudgetExceeded, match=r"over the budget of 2 .* Nothing was computed"):
        for number in range(1, 50):
            ask(job, number)
            assert Counted.looks > 0
            done = number
            releases, spent, reserved = site.spent()
            assert releases == number and 0 < spent <= 2.0 and reserved == 0
    assert 1 <= done < 49 and Counted.looks == 0
    before = site.spent()
    for retry in (1, 2):  # the same round again, another attempt, another client: all the same budget
        with pytest.raises(BudgetExceeded):
            ask(job, 1, attempt=retry, client=retry)
    assert site.spent() == before and Counted.looks == 0


def test_no_restart_and_no_other_job_brings_a_budget_back(private_job, at_site):
    site, job = at_site(epsilon=2.0), private_job()
    with pytest.raises(BudgetExceeded):
        for number in range(1, 50):
            handlers._warm.clear()  # as in a new process
            ask(job, number)
    spent = site.spent()
    for renamed in (private_job(job__name="innocent"), private_job(job__seed=5)):
        with pytest.raises(BudgetExceeded):
            ask(renamed)
    assert site.spent() == spent


def test_a_failed_training_stays_spent(private_job, at_site):
    site, job = at_site(), private_job()
    handler_for(job.canonical(), "client-0")
    Counted.fails = True
    with pytest.raises(JobError, match="private training failed at this site"):
        ask(job)
    releases, spent, reserved = site.spent()
    assert releases == 1 and spent > 0 and reserved == 0 and Counted.looks == 1
    with Ledger.open(site.site.ledger, counter=site.site.counter) as ledger:
        assert ledger.history(site.account)[-1].body["outcome"] == "failed"
    Counted.fails = False
    ask(job)
    assert site.spent()[0] == 2


def test_a_crash_in_training_stays_spent(private_job, at_site, monkeypatch):
    site, job = at_site(), private_job()
    handler_for(job.canonical(), "client-0")

    def killed(self, outputs, targets):
        raise KeyboardInterrupt

    monkeypatch.setattr(Counted, "loss", killed)
    with pytest.raises(KeyboardInterrupt):
        ask(job)
    assert site.spent()[0] == 1


def test_the_reservation_is_on_disk_while_the_data_is_looked_at(private_job, at_site, monkeypatch):
    site, job, seen = at_site(), private_job(), []
    handler_for(job.canonical(), "client-0")
    original = Digits.loss
    monkeypatch.setattr(Counted, "loss", lambda self, o, t: (seen.append(site.spent()), original(self, o, t))[1])
    ask(job)
    assert seen and all(releases == 1 and reserved > 0 for releases, _, reserved in seen)


REFUSED = {
    "another unit": ({"unit": "client"}, {}, "no budget for the unit 'sample'"),
    "another relation": ({"relation": "replace-one"}, {}, "accounted under replace-one"),
    "truncated batches under add-remove": ({}, {"privacy__max_batch": 400}, "accounted under add-remove"),
    "another task": ({"tasks": ["mnist"]}, {}, "lists the task"),
    "noise that the server can predict": ({}, {"privacy__insecure_noise": True}, "a site refuses it"),
}


@pytest.mark.parametrize(("dataset", "settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_site_did_not_agree_to_is_refused_before_anything(dataset, settings, message, private_job, at_site):
    site = at_site(**dataset)
    with pytest.raises(UsageError, match=message):
        ask(private_job(**settings))
    assert Counted.looks == 0 and site.spent()[0] == 0


def test_a_ledger_that_is_gone_or_of_another_site_is_no_ledger(private_job, at_site):
    site, job = at_site(), private_job()
    ask(job)
    site.file.write_text(site.file.read_text().replace("hospital", "other"))
    with pytest.raises(UsageError, match="is the ledger of site 'hospital'"):
        ask(job)
    site.file.write_text(site.file.read_text().replace("other", "hospital"))
    for file in site.site.ledger.parent.glob("ledger.sqlite*"):
        if file != site.site.counter:
            file.unlink()
    with pytest.raises(LedgerTampered, match="the ledger is gone"):
        ask(job)
    assert Counted.looks == 0


def test_a_site_with_one_example_is_refused_for_nothing(private_job, at_site, monkeypatch):
    site, job = at_site(), private_job()
    monkeypatch.setattr(Counted, "rows", 1)
    with pytest.raises(UsageError, match="at least 2 examples"):
        ask(job)
    assert site.spent()[0] == 0 and Counted.looks == 0
    monkeypatch.setattr(Counted, "rows", 2)
    handlers._warm.clear()
    ask(job)


def test_what_a_jobs_seed_holds_out_decides_about_no_refusal(private_job, at_site, monkeypatch):
    """A server that chooses seeds would learn from refusals, for nothing, which examples are there."""
    monkeypatch.setattr(Counted, "rows", 3)
    site, sizes = at_site(epsilon=50.0), set()
    for seed in range(8):
        job = private_job(job__seed=seed, data__holdout=0.7)
        ask(job)
        sizes.add(len(handler_for(job.canonical(), "client-0").data.rows("client-0").train))
    assert site.spent()[0] == 8 and sizes & {0, 1}


def test_no_more_rounds_than_the_jobs_own_claim_covers(private_job, at_site):
    site, job = at_site(epsilon=50.0), private_job(job__rounds=2, privacy__spare_rounds=1)
    for number in (1, 2, 2):
        ask(job, number)
    with pytest.raises(BudgetExceeded):
        ask(job, 2)
    assert site.spent()[0] == 3 and Counted.looks == 0


def test_an_evaluation_is_paid_for_too(private_job, at_site):
    settings = {"privacy__evaluation_noise": 5.0, "evaluation__clients": 0.5, "data__holdout": 0.2}
    site, job = at_site(epsilon=20.0), private_job(**settings)
    ask(job)
    alone = site.spent()
    ask(job, kind="evaluate")
    assert site.spent()[0] == 2 and site.spent()[1] > alone[1]


def test_client_level_privacy_reserves_the_whole_job_once(tiny_job, at_site):
    settings = {"unit": "client", "noise_multiplier": 8.0, "delta": 1e-6}
    job = tiny_job(task__name=TASK, **{f"privacy__{key}": value for key, value in settings.items()})
    site = at_site(unit="client", epsilon=20.0)
    admit(job)
    ask(job)
    _, once, _ = site.spent()
    for number in (2, 3, 3, 2):  # rounds and repeated rounds cost nothing more, as many as the claim covers
        ask(job, number)
    assert site.spent()[1] == once > 0
    with pytest.raises(BudgetExceeded):
        ask(job, 3)
    assert Counted.looks == 0 and site.spent()[1] == once
    admit(tiny_job(task__name=TASK, job__seed=1, **{f"privacy__{key}": value for key, value in settings.items()}))
    assert site.spent()[1] > once


def test_a_client_level_job_that_is_run_again_is_not_served_for_the_same_charge(tiny_job, at_site):
    """A site that is sampled now and then takes few of the rounds that it paid for. What is left is no second run."""
    settings = {"unit": "client", "noise_multiplier": 8.0, "delta": 1e-6, "spare_rounds": 1}
    job = tiny_job(
        task__name=TASK, job__rounds=40, local__steps=1, **{f"privacy__{key}": value for key, value in settings.items()}
    )
    site = at_site(unit="client", epsilon=20.0)
    admit(job)
    for number in (3, 17, 38):
        ask(job, number)
    _, once, _ = site.spent()
    ask(job, 38)  # a retry, or the round after a crash
    for again in (5, 38):
        handlers._warm.clear()  # as in a new process
        with pytest.raises(BudgetExceeded, match=r"after round 38.* another job\.name or job\.seed"):
            ask(job, again)
        assert Counted.looks == 0
    ask(job, 39)
    assert site.spent()[:2] == (6, once)  # the whole job, and five rounds


def test_truncation_is_charged_at_the_epsilon_of_the_sites_budget(private_job, at_site):
    """The additive δ carries 1 + e^ε of the whole claim: that of the budget, not of this one job."""
    rows = len(handler_for(private_job().canonical(), "client-1").data.rows("client-1").train)
    tight = int(stats.binom.isf(1e-12, rows, 0.2))
    site = at_site(relation="zero-out", epsilon=8.0, delta=1e-5)
    job = private_job(job__rounds=3, privacy__max_batch=tight, privacy__noise_multiplier=4.0, privacy__epsilon=4.0)
    ask(job, client=1)
    with Ledger.open(site.site.ledger, counter=site.site.counter) as ledger:
        charged = ledger.balance(site.account).slack_spent
    own = handler_for(job.canonical()).plan.truncation_slack(rows)
    assert charged == pytest.approx(own * (1 + np.exp(8)) / (1 + np.exp(4)), rel=1e-9) and own > 0
