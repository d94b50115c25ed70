"""A site's door: what it did not agree to is refused in words, and neither imported, built, read nor computed."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from flwr.app import Message, RecordDict

from client_app import handler as handlers
from client_app import spending
from client_app.admission import admitted
from client_app.handler import handle_admit, handle_evaluate, handle_train, handler_for
from fedplat import wire
from fedplat.errors import FedplatError, JobError, UsageError
from fedplat.flower import become_server, new_context, stamp
from fedplat.job import Job
from fedplat.model import read_arrays
from fedplat.task import Examples, Split
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity
from privacy.ledger import BudgetExceeded, Ledger
from privacy.site_budgets import ENVIRONMENT, create_site_ledger, load_site

SECRET = "patient 4711 has gout"
TASK = f"{__name__}:Placed"
WEAK = {"privacy__noise_multiplier": 0.05, "local__steps": 200}
"""Too little noise for the budget of any site here."""
CLIENTS = {"privacy__unit": "client", "privacy__noise_multiplier": 8.0}
PRIVATE = {"privacy__unit": "sample", "privacy__noise_multiplier": 2.0, "privacy__sample_rate": 0.2}


class Placed(Digits):
    """Remembers where it was told to read; may fail there."""

    folders: ClassVar[list[Path]] = []
    broken = False
    rows: ClassVar[int | None] = None

    def __init__(self, data_dir: Path, hidden: int = 8) -> None:
        type(self).folders.append(data_dir)
        super().__init__(data_dir, hidden)

    def data(self, split: Split) -> Examples:
        if type(self).broken:
            raise UsageError(f"{SECRET}: not a number")
        return super().data(split)[slice(type(self).rows)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(Placed, "folders", [])
    monkeypatch.setattr(Placed, "broken", False)
    monkeypatch.setattr(Placed, "rows", None)
    monkeypatch.setattr(handlers, "_warm", {})
    monkeypatch.delenv("FEDPLAT_DATA", raising=False)
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture
def at_site(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A site with one dataset; returns its ledger."""

    def make(extra: str = "", tasks: str = TASK) -> Path:
        file = tmp_path / "site.toml"
        terms = f"tasks = ['{tasks}']\nepsilon = 50.0\ndelta = 1e-5\n{extra}\n"
        file.write_text(f"[site]\nname = 'hospital'\n[datasets.wards]\n{terms}")
        site = load_site(file)
        create_site_ledger(site)
        monkeypatch.setenv(ENVIRONMENT, str(file))
        return site.ledger

    return make


@pytest.fixture
def job_with(tiny_job) -> Callable[..., Job]:
    return lambda **settings: tiny_job(**({"task__name": TASK} | settings))


def knock(job: Job, number: int = 1, kind: str = "train", arrays: bool = False, **node: object) -> Message:
    """Ask as a server does. What is refused at the door needs no arrays, and then nothing is built to make them."""
    content = RecordDict({wire.CONFIG: Identity(job.digest, number, 0).record()})
    if arrays:
        content[wire.ARRAYS] = wire.encode_arrays(read_arrays(handler_for(job.canonical()).state))
    become_server(7)
    message = Message(content, dst_node_id=100, message_type=kind)
    stamp(message)
    context = new_context(7, 100, {"partition-id": 0, **node}, {wire.JOB_KEY: job.canonical()})
    return {"train": handle_train, "evaluate": handle_evaluate, "query.admit": handle_admit}[kind](message, context)


def refusal(job: Job, number: int = 1, kind: str = "train") -> str:
    """Why the site refused, before it built anything."""
    with pytest.raises(UsageError) as refused:
        knock(job, number, kind)
    assert handlers._warm == {} and Placed.folders == []
    return str(refused.value)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_job_without_privacy_is_refused_unless_the_site_says_otherwise(kind, job_with, at_site):
    job = job_with(data__holdout=0.2, evaluation__clients=0.5)
    ledger = at_site()
    assert "only to private jobs. Add [privacy] to the job" in refusal(job, kind=kind)
    with Ledger.open(ledger) as opened:
        assert opened.accounts() == []
    ledger.unlink()
    ledger.with_name("ledger.sqlite.counter").unlink()
    at_site("allow_non_private = true")
    assert knock(job, kind=kind, arrays=True).content[wire.METRICS][wire.NUM_EXAMPLES] > 0


def test_without_a_site_file_plain_flower_stays_as_it_is(job_with):
    job = job_with(data__dir="somewhere")
    assert knock(job, arrays=True).content[wire.METRICS][wire.NUM_EXAMPLES] > 1
    assert Placed.folders == [Path("somewhere")]


def test_without_a_site_file_a_private_job_is_not_even_built(job_with):
    assert "$FEDPLAT_SITE names no site file" in refusal(job_with(**PRIVATE))


def test_virtual_clients_are_not_concerned(job_with, at_site):
    ledger = at_site()
    for job in (job_with(), job_with(**PRIVATE)):
        knock(job, arrays=True, **{wire.SIMULATED: True})
    with Ledger.open(ledger) as opened:
        assert opened.accounts() == []


REFUSED = {
    "files of the job's choice": ({"data__dir": "/srv/patients"}, 1, "a job does not choose which files a site reads"),
    "a model of the job's choice": ({"task__init_from": "/srv/model"}, 1, "task.init_from without task.init_sha256"),
    "noise to be solved": (
        {"privacy__noise_multiplier": None, "privacy__epsilon": 4.0},
        1,
        "a site does not solve for it. Send the job that `fedplat job run-config` prints",
    ),
    "noise that the server can predict": ({"privacy__insecure_noise": True}, 1, "a site refuses it"),
    "a round that is none": ({}, 0, "round 0 is none of this job's rounds, 1 to 3"),
    "a round after the last": ({}, 4, "round 4 is none of this job's rounds, 1 to 3"),
    "a round before all": ({}, -1, "round -1 is none of this job's rounds, 1 to 3"),
    "another unit": (
        {"privacy__unit": "client", "privacy__sample_rate": None},
        1,
        "The job's privacy.unit must be 'sample'",
    ),
    "another relation": ({"privacy__max_batch": 500}, 1, "the job under zero-out"),
}


@pytest.mark.parametrize(("settings", "number", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_site_does_not_agree_to_is_refused_in_words(settings, number, message, job_with, at_site):
    at_site()
    assert message in refusal(job_with(**(PRIVATE | settings)), number)


def test_a_client_level_round_must_be_one_of_the_jobs_too(job_with, at_site):
    at_site("unit = 'client'")
    settings = {"privacy__unit": "client", "privacy__noise_multiplier": 8.0}
    assert "round 4 is none of this job's rounds" in refusal(job_with(**settings), 4)


@pytest.mark.parametrize("settings", [{}, PRIVATE], ids=["not private", "private"])
def test_a_task_that_the_site_did_not_list_is_not_imported(settings, job_with, at_site, tmp_path, monkeypatch):
    (tmp_path / "unlisted_task.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    at_site("allow_non_private = true", tasks="digits")
    job = job_with(task__name="unlisted_task:Own", **settings)
    assert "no dataset of site 'hospital' lists the task 'unlisted_task:Own'" in refusal(job)
    assert "unlisted_task" not in sys.modules


@pytest.mark.parametrize("settings", [{}, PRIVATE], ids=["not private", "private"])
def test_a_dataset_is_read_from_where_the_site_says(settings, job_with, at_site, tmp_path, monkeypatch):
    at_site("dir = 'wards'\nallow_non_private = true")
    monkeypatch.setenv("FEDPLAT_DATA", "elsewhere")
    with pytest.raises(FedplatError):  # no arrays; but by then it was built
        knock(job_with(**settings))
    assert Placed.folders == [tmp_path / "wards"]
    file = tmp_path / "site.toml"
    file.write_text(file.read_text().replace("dir = 'wards'", ""))
    with pytest.raises(FedplatError):
        knock(job_with(job__seed=1, **settings))
    assert Placed.folders == [tmp_path / "wards", Path("elsewhere")]


def test_why_a_private_job_could_not_be_loaded_is_told_to_the_sites_log_only(job_with, at_site, monkeypatch, caplog):
    at_site("allow_non_private = true")
    monkeypatch.setattr(Placed, "broken", True)
    with caplog.at_level(logging.ERROR), pytest.raises(JobError) as told:
        knock(job_with(**PRIVATE))
    assert str(told.value) == "this site could not load the private job: the reason is in its own log"
    assert told.value.__suppress_context__ and told.value.__cause__ is None
    assert SECRET in caplog.text
    with pytest.raises(UsageError, match=SECRET):  # without [privacy] nothing is hidden
        knock(job_with())


PARTITIONS = {
    "iid": {"kind": "iid"},
    "by label": {"kind": "dirichlet"},
    "by size": {"kind": "quantity", "min_examples": 100},
    "shards": {"kind": "shards"},
    "a file that is not there": {"kind": "explicit", "file": "/nowhere/lists.json"},
}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
@pytest.mark.parametrize("settings", [{}, PRIVATE], ids=["not private", "private"])
def test_a_sites_records_are_its_own_whatever_the_jobs_partition(settings, partition, job_with, at_site, monkeypatch):
    """One record more must leave the others where they were: a partition would deal hundreds of them anew."""
    at_site("allow_non_private = true")
    for rows in (99, 100, 101):
        monkeypatch.setattr(Placed, "rows", rows)
        handlers._warm.clear()
        job = job_with(data__partition=partition, cohort__clients=100, **settings)
        with pytest.raises(FedplatError):  # no arrays; but by then it was loaded
            knock(job)
        ((handler,),) = [list(handlers._warm.values())]
        assert handler.data.names() == ["client-0"]
        assert handler.data.rows("client-0").train.tolist() == list(range(rows))


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
def test_how_many_records_there_are_is_told_to_nobody_for_nothing(partition, job_with, at_site, monkeypatch):
    """The same words whatever the number of records, if nothing was charged."""
    ledger = at_site()
    answers = set()
    for rows in (2, 99, 100, 101, 199, 200):
        monkeypatch.setattr(Placed, "rows", rows)
        handlers._warm.clear()
        for clients in (2, 100):
            job = job_with(data__partition=partition, cohort__clients=clients, **(PRIVATE | WEAK))
            answers.add(refusal(job).partition(": ")[0])
    assert len(answers) == 1
    with Ledger.open(ledger) as opened:
        assert opened.balance("wards/sample").releases == 0


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_a_job_that_the_budget_can_not_pay_loads_nothing(unit, job_with, at_site):
    ledger = at_site(f"unit = '{unit}'")
    job = job_with(**(PRIVATE | WEAK if unit == "sample" else CLIENTS | {"privacy__noise_multiplier": 0.05}))
    kinds = ("train",) if unit == "sample" else ("query.admit",)
    for kind in kinds:
        assert "over the budget of 50" in refusal(job, 1 if kind == "train" else 0, kind)
    with Ledger.open(ledger) as opened:
        before = opened.head()
        assert opened.balance(f"wards/{unit}").releases == 0
    with pytest.raises(BudgetExceeded), admitted(job, Identity(job.digest, 1, 1)):  # as the site agent asks
        raise AssertionError("loaded")
    with Ledger.open(ledger) as opened:
        assert opened.head() == before


def test_a_job_that_has_paid_is_loaded_again_for_what_it_paid(job_with, at_site):
    """A site agent that was killed after the last charge has a reply to deliver, and an empty budget."""
    at_site()
    job = job_with(**PRIVATE, job__rounds=1, privacy__spare_rounds=0)
    knock(job, arrays=True)
    with pytest.raises(BudgetExceeded):
        knock(job, arrays=True)
    with admitted(job, Identity(job.digest, 1, 1)):
        pass


def test_a_site_opens_no_file_that_a_partition_names(job_with, at_site, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
    at_site("share = 'partition'")
    partition = {"kind": "explicit", "file": str(tmp_path / "pipe")}
    assert "a site opens no file of a job's choice" in refusal(job_with(data__partition=partition, **PRIVATE))


def test_a_model_is_not_read_from_a_pipe(job_with, at_site, tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    at_site()
    settings = {"task__init_from": str(tmp_path / "pipe"), "task__init_sha256": "0" * 64}
    with caplog.at_level(logging.ERROR), pytest.raises(JobError):
        knock(job_with(**settings, **PRIVATE))
    assert "it is no regular file" in caplog.text


def test_shared_files_are_dealt_out_as_in_a_simulation(job_with, at_site):
    at_site("share = 'partition'")
    with pytest.raises(FedplatError):
        knock(job_with(**PRIVATE))
    (handler,) = handlers._warm.values()
    assert len(handler.data.names()) == 6


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_who_was_not_admitted_before_sampling_is_not_served(sampling, job_with, at_site):
    """A site that pays when it is sampled pays for a part of what amplification by sampling assumes."""
    relation = "replace-one" if sampling == "fixed" else "add-remove"
    ledger = at_site(f"unit = 'client'\nrelation = '{relation}'")
    job = job_with(**CLIENTS, privacy__sampling=sampling)
    assert "was not admitted here" in refusal(job)
    with Ledger.open(ledger) as opened:
        assert opened.balance("wards/client").releases == 0
    for _ in range(2):  # asked again, after a restart of the server: the same reservation
        knock(job, 0, "query.admit")
        assert handlers._warm == {} and Placed.folders == []
        with Ledger.open(ledger) as opened:
            balance = opened.balance("wards/client")
            assert balance.releases == 1 and balance.spent_epsilon == balance.reserved_epsilon > 0
    knock(job, arrays=True)
    with Ledger.open(ledger) as opened:
        assert opened.balance("wards/client").spent_epsilon == balance.spent_epsilon
        assert opened.balance("wards/client").reserved_epsilon == 0


def test_an_admission_passes_the_same_door(job_with, at_site):
    at_site("unit = 'client'")
    for settings, message in (
        (PRIVATE, "only jobs with privacy.unit = 'client'"),
        ({}, "only to private jobs"),
        (CLIENTS | {"privacy__noise_multiplier": None, "privacy__epsilon": 4.0}, "a site does not solve for it"),
        (CLIENTS | {"privacy__insecure_noise": True}, "a site refuses it"),
        (CLIENTS | {"privacy__sampling": "fixed"}, "the job under replace-one"),
        (CLIENTS | {"data__dir": "/srv"}, "a job does not choose"),
    ):
        assert message in refusal(job_with(**settings), 0, "query.admit")


def test_a_virtual_client_admits_everything_and_pays_nothing(job_with, at_site):
    ledger = at_site("unit = 'client'")
    knock(job_with(**CLIENTS), 0, "query.admit", **{wire.SIMULATED: True})
    with Ledger.open(ledger) as opened:
        assert opened.accounts() == []


def test_a_round_that_takes_a_sites_day_is_refused_however_little_it_costs(job_with, at_site, tmp_path):
    at_site()
    cheap = PRIVATE | {"privacy__noise_multiplier": 1e6}
    assert "policy.max_steps: a round has 1000000 local steps" in refusal(job_with(**cheap, local__steps=1_000_000))
    rare = cheap | {"privacy__sample_rate": 1e-5, "local__steps": None, "local__epochs": 2}
    assert "policy.max_steps: a round has 200000 local steps" in refusal(job_with(**rare))
    file = tmp_path / "site.toml"
    file.write_text(file.read_text() + "[policy]\nmax_steps = 4\n")
    assert "site 'hospital' allows 4" in refusal(job_with(**PRIVATE, local__steps=5))


def test_a_sites_own_log_says_that_its_delta_protects_nobody(job_with, at_site, caplog, monkeypatch):
    at_site()
    monkeypatch.setattr(spending, "_warned", set())
    for rows, warned in ((100_000, False), (100, False)):
        monkeypatch.setattr(Placed, "rows", rows)
        handlers._warm.clear()
        knock(job_with(job__seed=rows, **PRIVATE), arrays=True)
        assert ("is not below 1/" in caplog.text) == warned
    file = Path(os.environ[ENVIRONMENT])
    file.write_text(file.read_text().replace("[datasets.wards]", "[datasets.others]").replace("1e-5", "0.02"))
    knock(job_with(job__seed=3, **PRIVATE), arrays=True)
    assert "datasets.others.delta = 0.02 is not below 1/100 (examples here)" in caplog.text
