"""A site that serves one request at a time: what a crash left reserved pays for the same release, and for no other."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from client_app.charges import Purpose
from client_app.spending import admit_job, spending
from fedplat.errors import JobError
from fedplat.job import Job
from fedplat.wire import Identity
from privacy import plan_of
from privacy.ledger import Entry, Ledger
from privacy.plan import PrivacyPlan
from privacy.site_budgets import ENVIRONMENT, Site, create_site_ledger, load_site

EXAMPLES = 100


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    file = tmp_path / "site.toml"
    file.write_text("[site]\nname = 'hospital'\n[datasets.digits]\ntasks = ['digits']\nepsilon = 50.0\ndelta = 1e-5\n")
    made = load_site(file)
    create_site_ledger(made)
    monkeypatch.setenv(ENVIRONMENT, str(file))
    yield made


@pytest.fixture
def private(tiny_job) -> tuple[Job, PrivacyPlan]:
    privacy = {"unit": "sample", "noise_multiplier": 2.0, "sample_rate": 0.2, "evaluation_noise": 5.0}
    job = tiny_job(
        evaluation__clients=0.5, data__holdout=0.2, **{f"privacy__{key}": value for key, value in privacy.items()}
    )
    plan = plan_of(job)
    assert plan is not None
    return job, plan


def who(job: Job, number: int = 1, attempt: int = 1, client: str = "client-0") -> Identity:
    return Identity(job.digest, number, attempt, client)


def entries(site: Site, kind: str) -> list[Entry]:
    """From a ledger that is opened anew, and verified."""
    with Ledger.open(site.ledger, site.name, counter=site.counter) as ledger:
        return [entry for account in ledger.accounts() for entry in ledger.history(account) if entry.kind == kind]


def outcomes(site: Site) -> list[str]:
    return [entry.body["outcome"] for entry in entries(site, "commit")]


def until_killed(job: Job, plan: PrivacyPlan, identity: Identity, mark: Path, purpose: Purpose) -> None:
    with spending(job, plan, identity, None, purpose, EXAMPLES, alone=True):
        mark.touch()
        time.sleep(600)


def die_while_computing(
    private: tuple[Job, PrivacyPlan], identity: Identity, folder: Path, purpose: Purpose = "train"
) -> None:
    """A process of its own reserves, begins to compute, and is killed."""
    mark = folder / "computing"
    mark.unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=until_killed, args=(*private, identity, mark, purpose))
    child.start()
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert child.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def serve(private: tuple[Job, PrivacyPlan], identity: Identity, alone: bool = True, purpose: Purpose = "train") -> None:
    job, plan = private
    with spending(job, plan, identity, None, purpose, EXAMPLES, alone=alone):
        pass


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_what_a_killed_process_reserved_pays_for_the_same_release(purpose, private, site, tmp_path):
    for _ in range(3):  # killed again and again
        die_while_computing(private, who(private[0]), tmp_path, purpose)
    assert len(entries(site, "reserve")) == 1 and outcomes(site) == []
    serve(private, who(private[0]), purpose=purpose)
    assert len(entries(site, "reserve")) == 1 and outcomes(site) == ["released"]


def test_a_released_one_pays_for_nothing_more(private, site):
    for count in (1, 2):
        serve(private, who(private[0]))
        assert len(entries(site, "reserve")) == count and outcomes(site) == ["released"] * count


def test_a_failed_one_pays_for_nothing_more(private, site):
    with (
        pytest.raises(JobError, match="private training failed"),
        spending(*private, who(private[0]), None, "train", EXAMPLES, alone=True),
    ):
        raise RuntimeError("disk on fire")
    assert outcomes(site) == ["failed"]
    serve(private, who(private[0]))
    assert len(entries(site, "reserve")) == 2 and outcomes(site) == ["failed", "released"]


OTHERS: dict[str, Callable[[Job], tuple[Identity, Purpose]]] = {
    "another round": lambda job: (who(job, 2), "train"),
    "another attempt": lambda job: (who(job, 1, 2), "train"),
    "another client": lambda job: (who(job, client="client-1"), "train"),
    "another purpose": lambda job: (who(job), "evaluate"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_it_pays_for_no_other_release(other, private, site, tmp_path):
    die_while_computing(private, who(private[0]), tmp_path)
    identity, purpose = other(private[0])
    serve(private, identity, purpose=purpose)
    assert len(entries(site, "reserve")) == 2
    serve(private, who(private[0]))  # and still pays for its own
    assert len(entries(site, "reserve")) == 2 and outcomes(site) == ["released"] * 2


def test_it_pays_for_no_other_job(private, site, tmp_path, tiny_job):
    die_while_computing(private, who(private[0]), tmp_path)
    table = private[0].model_dump()
    table["job"]["seed"] = 5
    other = Job.model_validate(table)
    plan = plan_of(other)
    assert plan is not None
    serve((other, plan), who(other))
    assert len(entries(site, "reserve")) == 2


def test_without_alone_it_is_a_new_spend(private, site, tmp_path):
    """Two processes that both went on with one reservation would release twice for one charge."""
    die_while_computing(private, who(private[0]), tmp_path)
    serve(private, who(private[0]), alone=False)
    assert len(entries(site, "reserve")) == 2


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_being_stopped_leaves_it_open(stopped, private, site):
    with pytest.raises(stopped), spending(*private, who(private[0]), None, "train", EXAMPLES, alone=True):
        raise stopped
    assert len(entries(site, "reserve")) == 1 and outcomes(site) == []
    serve(private, who(private[0]))
    assert len(entries(site, "reserve")) == 1 and outcomes(site) == ["released"]


def test_without_alone_being_stopped_settles_it(private, site):
    with pytest.raises(KeyboardInterrupt), spending(*private, who(private[0]), None, "train", EXAMPLES):
        raise KeyboardInterrupt
    assert outcomes(site) == ["failed"]


def test_a_whole_job_is_paid_for_once_and_its_rounds_counted_once(site, tmp_path, tiny_job):
    file = site.path
    file.write_text(file.read_text().replace("epsilon", "unit = 'client'\nepsilon"))
    job = tiny_job(privacy__unit="client", privacy__noise_multiplier=8.0, privacy__delta=1e-6)
    plan = plan_of(job)
    assert plan is not None
    admit_job(job, who(job))
    for _ in range(2):
        die_while_computing((job, plan), who(job), tmp_path)
    serve((job, plan), who(job))
    assert [entry.body["purpose"] for entry in entries(site, "reserve")] == ["job", "train"]
