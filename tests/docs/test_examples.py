"""What the docs show is run: the example task, the ready-made scenarios, links between pages."""

import re
from pathlib import Path

import pytest

from fedplat.job import load_job
from fedplat.summary import summarise
from tests.conftest import SHARED

REPOSITORY = Path(__file__).parents[2]
SCENARIOS = sorted((REPOSITORY / "simulations/scenarios").glob("*.toml"))
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")]


def test_the_example_task_learns_both_things(monkeypatch, simulated):
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs/examples"))
    job = load_job(REPOSITORY / "docs/examples/vital_signs.toml", ["job.rounds=12"])
    measured = summarise(simulated(job)).server
    assert {"risk", "stay", "accuracy", "days_off"} <= measured[0].keys()
    assert measured[12]["accuracy"] > 0.85 and measured[12]["days_off"] < measured[0]["days_off"] / 2


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_runs(path, simulated):
    overrides = ["job.rounds=2"]
    if load_job(path).task.name == "mnist":
        if not (SHARED / "data/mnist").is_dir():
            pytest.skip("MNIST files are not on this machine")
        overrides += [f"data.dir={SHARED / 'data/mnist'}", f"cohort.size={min(2, load_job(path).cohort.clients)}"]
    run = simulated(load_job(path, overrides))
    assert summarise(run).status == "finished"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
