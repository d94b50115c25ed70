"""Real Flower processes, each site with its own budget: one runs out, refuses, and the run goes on without it."""

from pathlib import Path

import pytest

from fedplat.events import ClientFailed, PrivacySpent, RoundFinished, RunFinished, read_events
from fedplat.rundir import list_runs
from privacy.plan import plan_privacy
from privacy.site_budgets import create_site_ledger, load_site, open_site_ledger
from tests.federation.flower_processes import FlowerFederation

ROUNDS = 3


def make_site(folder: Path, name: str, epsilon: float) -> dict[str, str]:
    """A site's own file and ledger; returns the environment of its node."""
    folder.mkdir()
    path = folder / "site.toml"
    path.write_text(
        f'[site]\nname = "{name}"\nledger = "ledger.sqlite"\n'
        f'[datasets.digits]\ntasks = ["digits"]\nunit = "sample"\nepsilon = {epsilon}\ndelta = 1e-5\n'
    )
    create_site_ledger(load_site(path))
    return {"FEDPLAT_SITE": str(path)}


@pytest.mark.slow
def test_a_site_with_an_empty_budget_refuses_and_the_run_goes_on(app: Path, tmp_path: Path, tiny_job):
    privacy = {"unit": "sample", "noise_multiplier": 2.0, "sample_rate": 0.1, "delta": 1e-5}
    private = {f"privacy__{key}": value for key, value in privacy.items()}
    job = tiny_job(cohort__clients=2, cohort__fraction=1.0, job__rounds=ROUNDS, local__steps=4, **private)
    run_config = tmp_path / "run.toml"
    run_config.write_text(f"job = '{job.canonical()}'\n")
    sites = (make_site(tmp_path / "rich", "rich", 8.0), make_site(tmp_path / "poor", "poor", 1.0))
    with FlowerFederation(tmp_path, 2, sites) as federation:
        federation.flwr("run", str(app), "here", "--stream", "--run-config", str(run_config))
    (run,) = list_runs(tmp_path / "runs")
    events = read_events(run.events_file)
    assert any(isinstance(event, RunFinished) for event in events)
    refusals = [event for event in events if isinstance(event, ClientFailed)]
    assert refusals and {event.client for event in refusals} == {"client-1"}
    assert all("digits/sample" in event.reason for event in refusals), refusals
    assert [e.accepted for e in events if isinstance(e, RoundFinished)][-1] == 1
    for name, releases in (("rich", ROUNDS), ("poor", ROUNDS - len(refusals))):
        with open_site_ledger(load_site(tmp_path / name / "site.toml")) as ledger:
            ledger.verify()
            balance = ledger.balance("digits/sample")
            assert balance.releases == releases and balance.spent_epsilon <= balance.epsilon
    plan = plan_privacy(job)
    spent = [event for event in events if isinstance(event, PrivacySpent)]
    assert plan is not None and plan.releases == ROUNDS + plan.section.spare_rounds
    # A server can't see how often a site was asked: it claims the most that it may have spent.
    assert spent[-1].epsilon == pytest.approx(plan.epsilon(), rel=0.01)


@pytest.mark.slow
def test_without_a_site_file_nothing_private_is_trained(app: Path, tmp_path: Path, tiny_job):
    privacy = {"privacy__unit": "sample", "privacy__noise_multiplier": 2.0, "privacy__sample_rate": 0.1}
    job = tiny_job(cohort__clients=1, cohort__fraction=1.0, job__rounds=1, **privacy)
    run_config = tmp_path / "run.toml"
    run_config.write_text(f"job = '{job.canonical()}'\n")
    with FlowerFederation(tmp_path, 1) as federation:
        federation.flwr("run", str(app), "here", "--stream", "--run-config", str(run_config))
    (run,) = list_runs(tmp_path / "runs")
    events = read_events(run.events_file)
    assert not any(isinstance(event, RoundFinished) for event in events)
    assert any(isinstance(event, ClientFailed) and "FEDPLAT_SITE" in event.reason for event in events)
