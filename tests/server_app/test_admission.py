"""Unit client at real sites: everybody pays for the whole job before cohorts are drawn, sampled or not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message

from client_app import handler as handlers
from client_app.app import app
from fedplat import wire
from fedplat.errors import JobError
from fedplat.events import ClientFailed, ClientTrained, RoundStarted, read_events
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from privacy.ledger import Balance, Ledger
from privacy.site_budgets import ENVIRONMENT, create_site_ledger, load_site
from server_app.run import resume_run, start_run
from simulations.local_grid import LocalGrid

CLIENTS = 4


class Sites:
    """The client app, run for each node as the node of a real site: its own file, its own ledger, not simulated."""

    def __init__(self, folder: Path, budgets: tuple[float, ...], relation: str) -> None:
        self.sites, self.heard = [], []
        for number, epsilon in enumerate(budgets):
            path = folder / f"site-{number}" / "site.toml"
            path.parent.mkdir()
            dataset = f"tasks = ['digits']\nunit = 'client'\nrelation = '{relation}'\nepsilon = {epsilon}\ndelta = 1e-5"
            path.write_text(f"[site]\nname = 'site-{number}'\n[datasets.digits]\n{dataset}\n")
            create_site_ledger(load_site(path))
            self.sites.append(path)

    def __call__(self, message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        context.node_config.pop(wire.SIMULATED)
        self.heard.append((message.metadata.message_type, number))
        os.environ[ENVIRONMENT] = str(self.sites[number])
        try:
            return app(message, context)
        finally:
            del os.environ[ENVIRONMENT]

    def balance(self, number: int) -> Balance:
        site = load_site(self.sites[number])
        with Ledger.open(site.ledger, counter=site.counter) as ledger:
            return ledger.balance("digits/client")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(handlers, "_warm", {})


@pytest.fixture
def sites_of(tmp_path) -> Callable[..., Sites]:
    return lambda *budgets, relation="add-remove": Sites(tmp_path, budgets, relation)


@pytest.fixture
def client_job(tiny_job) -> Callable[..., Job]:
    def make(**settings: object) -> Job:
        privacy = {"unit": "client", "noise_multiplier": 6.0, "delta": 1e-6}
        defaults = {"cohort__clients": CLIENTS, "cohort__fraction": 0.25, "local__steps": 1}
        return tiny_job(**(defaults | {f"privacy__{key}": value for key, value in privacy.items()} | settings))

    return make


def run_at(sites: Sites, job: Job, tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run", job)
    grid = LocalGrid(sites, CLIENTS, {wire.JOB_KEY: job.canonical()})
    start_run(job, grid, run, where="flower")
    return run


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_site_pays_the_same_whether_it_is_sampled_or_not(sampling, sites_of, client_job, tmp_path):
    sites = sites_of(*[20.0] * CLIENTS, relation="replace-one" if sampling == "fixed" else "add-remove")
    job = client_job(job__rounds=2, privacy__sampling=sampling)
    events = read_events(run_at(sites, job, tmp_path).events_file)
    asked = {client for event in events if isinstance(event, RoundStarted) for client in event.cohort}
    assert len(asked) < CLIENTS or sampling == "poisson"
    spent = {sites.balance(number).rdp_spent for number in range(CLIENTS)}
    assert len(spent) == 1 and spent.pop() > 0
    admissions = [number for kind, number in sites.heard if kind == "query.admit"]
    assert sorted(admissions) == list(range(CLIENTS))  # once each, not once a round
    first_train = next((i for i, (kind, _) in enumerate(sites.heard) if kind == "train"), len(sites.heard))
    assert all(kind != "query.admit" for kind, _ in sites.heard[first_train:])


def test_who_can_not_pay_is_not_asked_to_train_and_the_run_goes_on(sites_of, client_job, tmp_path):
    sites = sites_of(20.0, 0.05, 20.0, 20.0)
    job = client_job(job__rounds=3, cohort__fraction=1.0)
    events = read_events(run_at(sites, job, tmp_path).events_file)
    failed = [event for event in events if isinstance(event, ClientFailed)]
    assert [(event.round, event.client) for event in failed] == [(1, "client-1"), (2, "client-1"), (3, "client-1")]
    assert all("not admitted" in event.reason and "digits/client" in event.reason for event in failed)
    assert len([event for event in events if isinstance(event, ClientTrained)]) == 9
    assert ("train", 1) not in sites.heard and sites.balance(1).releases == 0


def test_a_resumed_run_asks_again_and_costs_nothing_more(sites_of, client_job, tmp_path):
    sites = sites_of(*[20.0] * CLIENTS)
    job = client_job(cohort__fraction=1.0, cohort__on_shortfall="stop", cohort__min_replies=CLIENTS)
    broken = sites.sites[2].with_suffix(".away")
    sites.sites[2].rename(broken)
    with pytest.raises(JobError, match="3 accepted updates"):
        run_at(sites, job, tmp_path)
    broken.rename(sites.sites[2])
    spent = sites.balance(0).rdp_spent
    resume_run(
        LocalGrid(sites, CLIENTS, {wire.JOB_KEY: job.canonical()}), RunDirectory.open(tmp_path / "run"), where="flower"
    )
    assert [sites.balance(number).rdp_spent for number in range(CLIENTS)] == [spent] * CLIENTS


@pytest.mark.parametrize("sampling", ["none", "banded"])
def test_where_no_sampling_is_claimed_nobody_is_asked_in_advance(sampling, sites_of, client_job, tmp_path):
    sites = sites_of(*[20.0] * CLIENTS)
    separation = {"privacy__min_separation": 2, "cohort__fraction": 0.5} if sampling == "banded" else {}
    run_at(sites, client_job(job__rounds=1, privacy__sampling=sampling, **separation), tmp_path)
    trained = {number for kind, number in sites.heard if kind == "train"}
    assert not any(kind == "query.admit" for kind, _ in sites.heard) and trained
    assert all(sites.balance(number).rdp_spent > 0 for number in trained)


def test_virtual_clients_are_not_asked(client_job, simulated):
    job = client_job(job__rounds=1)
    kinds = []

    def listen(message: Message, context: Context) -> Message:
        kinds.append(message.metadata.message_type)
        return app(message, context)

    run = RunDirectory.create(simulated(job, "first").path.parent / "run", job)
    start_run(job, LocalGrid(listen, CLIENTS, {wire.JOB_KEY: job.canonical()}), run)
    assert "query.admit" not in kinds
