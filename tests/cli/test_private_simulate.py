"""`fedplat simulate` with privacy: one line, an ε that holds, and bad input that starts nothing."""

import json
from pathlib import Path

import pytest
from torch import nn

from fedplat.events import PrivacySpent, read_events
from fedplat.rundir import RunDirectory
from fedplat.tasks.digits import Digits
from privacy import accounting
from privacy.ledger import Ledger
from tests.cli.conftest import FAST

SET = "--set"


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in (SET, override)]


SAMPLE = sets("privacy.unit=sample", "privacy.epsilon=4")


class Coupled(Digits):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


def test_one_line_gives_epsilon_delta_and_a_ledger(fedplat):
    result = fedplat("simulate", *FAST, *SAMPLE, "--set", "job.rounds=2", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert 0 < found["epsilon"] <= 4 and found["delta"] == 1e-5
    assert found["unit"] == "sample" and found["relation"] == "add-remove" and found["accountant"] == "pld"
    assert found["trusts_server"] is False and found["insecure_noise"] is False
    with Ledger.open(Path(found["ledger"]), "simulation") as ledger:
        ledger.verify()
        most = max(balance.spent_epsilon for balance in ledger.balances())
    assert found["epsilon"] == pytest.approx(most, rel=1e-3)
    run = RunDirectory(Path(found["run"]))
    job = run.job()
    assert job.privacy.noise_multiplier and job.privacy.sample_rate and job.privacy.participations
    spent = [event for event in read_events(run.events_file) if isinstance(event, PrivacySpent)]
    assert [event.round for event in spent] == [1, 2]
    assert spent[0].epsilon <= spent[1].epsilon == found["epsilon"]


def test_a_run_without_privacy_says_nothing_about_epsilon(fedplat):
    found = json.loads(fedplat("simulate", *FAST, "--json").out)
    assert "epsilon" not in found and "ledger" not in found
    assert not (Path(found["run"]) / "ledger.sqlite").exists()


def test_the_report_names_unit_relation_and_accountant_and_warns_of_insecure_noise(fedplat):
    result = fedplat("simulate", *FAST, *SAMPLE, *sets("privacy.insecure_noise=true", "job.rounds=1"))
    assert result.code == 0
    text = result.out + result.err
    assert "one example of a client (add-remove, PLD" in text and "INSECURE NOISE: not private" in text


def test_client_level_privacy_says_that_the_server_is_trusted(fedplat):
    arguments = sets("privacy.unit=client", "privacy.noise_multiplier=5", "job.rounds=2")
    found = json.loads(fedplat("simulate", *FAST, *arguments, "--json").out)
    assert found["unit"] == "client" and found["trusts_server"] is True and found["epsilon"] > 0
    assert Path(found["ledger"]).exists()


def test_a_private_run_that_was_stopped_is_resumed_and_costs_no_less(fedplat):
    """A job whose updates are all refused stops in round 1; trying again is a second spend of that round."""
    failing = sets("server.max_update_norm=1e-12")
    result = fedplat("simulate", *FAST, *SAMPLE, *failing, "--out", "run")
    assert result.code == 1
    with Ledger.open(Path("run/ledger.sqlite"), "simulation") as ledger:
        before = {balance.account: balance.releases for balance in ledger.balances()}
    assert fedplat("resume", "run").code == 1
    with Ledger.open(Path("run/ledger.sqlite"), "simulation") as ledger:
        after = {balance.account: balance.releases for balance in ledger.balances()}
    assert sum(before.values()) > 0 and sum(after.values()) == 2 * sum(before.values())


CASES = {
    "no unit": (["privacy.epsilon=4"], "privacy.unit"),
    "unknown unit": (["privacy.unit=patient", "privacy.epsilon=4"], "privacy.unit"),
    "epsilon 0": (["privacy.unit=sample", "privacy.epsilon=0"], "privacy.epsilon must be > 0"),
    "epsilon below 0": (["privacy.unit=sample", "privacy.epsilon=-1"], "privacy.epsilon must be > 0"),
    "noise 0": (["privacy.unit=sample", "privacy.noise_multiplier=0.0"], "without noise nothing is private"),
    "noise too small": (
        ["privacy.unit=sample", "privacy.epsilon=0.5", "privacy.noise_multiplier=0.6"],
        "privacy.noise_multiplier = 0.6 gives ε",
    ),
    "clip norm 0": (["privacy.unit=sample", "privacy.epsilon=4", "privacy.clip_norm=0.0"], "privacy.clip_norm"),
    "delta 1": (["privacy.unit=sample", "privacy.epsilon=4", "privacy.delta=1.0"], "privacy.delta must be < 1"),
    "a time limit": (["privacy.unit=sample", "privacy.epsilon=4", "local.seconds=1"], "local.seconds"),
    "half precision": (["privacy.unit=sample", "privacy.epsilon=4", "local.precision=bf16"], "local.precision"),
    "metrics without noise": (
        ["privacy.unit=sample", "privacy.epsilon=4", "evaluation.clients=0.5", "data.holdout=0.2"],
        "privacy.evaluation_noise",
    ),
    "ray": (["privacy.unit=sample", "privacy.epsilon=4", "simulation.engine=ray"], "engine ray"),
    "participations of clients": (
        ["privacy.unit=client", "privacy.epsilon=4", "privacy.participations=3"],
        "privacy.participations is for unit sample",
    ),
    "a batch larger than any client's data": (
        ["privacy.unit=sample", "privacy.epsilon=4", "local.batch_size=1400"],
        "no client holds more than",
    ),
    "truncated too soon": (
        ["privacy.unit=sample", "privacy.epsilon=4", "privacy.max_batch=16"],
        "privacy.max_batch = 16 is too small",
    ),
    "count noise that costs too much": (
        ["privacy.unit=sample", "privacy.noise_multiplier=2.0", "privacy.adaptive.count_noise=0.5"],
        "privacy.adaptive.count_noise",
    ),
    "a task that couples examples": (
        ["privacy.unit=sample", "privacy.noise_multiplier=2.0", f"task.name={__name__}:Coupled"],
        "layer '0' (BatchNorm1d)",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_explained_and_nothing_is_started(overrides, message, fedplat):
    result = fedplat("simulate", *sets("job.rounds=3", "cohort.clients=8", *overrides))
    assert result.code == 2, result.out + result.err
    assert result.err.startswith("error: ") and message in result.err
    assert "Traceback" not in result.err
    assert not Path("runs").exists()


def test_a_delta_that_protects_nobody_is_warned_about(fedplat, caplog):
    result = fedplat("simulate", *FAST, *SAMPLE, *sets("privacy.delta=0.1", "job.rounds=1"))
    assert result.code == 0
    assert "is not below 1/" in result.err + result.out + caplog.text


def test_every_private_run_says_what_each_accountant_found(fedplat):
    arguments = sets("privacy.unit=client", "privacy.noise_multiplier=5", "job.rounds=2")
    found = json.loads(fedplat("simulate", *FAST, *arguments, "--out", "run", "--json").out)
    assert found["witnesses"].keys() == {"pld", "rdp", "prv"}
    assert found["witnesses"]["pld"] <= found["witnesses"]["rdp"] + 0.005
    started = read_events(Path("run/events.jsonl"))[0]
    assert started.witnesses == found["witnesses"] and found["epsilon"] <= found["witnesses"]["pld"] + 1e-3
    assert "one witness" not in fedplat("simulate", *FAST, *arguments).out


def test_a_claim_that_nothing_vouches_for_is_labelled(fedplat):
    arguments = sets("privacy.unit=client", "privacy.noise_multiplier=5", "privacy.sampling=fixed", "job.rounds=1")
    assert "(one witness)" in fedplat("simulate", *FAST, *arguments).out.replace("\n", " ")
    found = json.loads(fedplat("simulate", *FAST, *arguments, "--json").out)
    assert found["witnesses"].keys() == {"rdp"}


@pytest.mark.parametrize("wrong", ["rdp", "prv"])
def test_accountants_that_disagree_stop_a_run_before_its_first_round(wrong, fedplat, monkeypatch):
    monkeypatch.setitem(accounting._EPSILON_BY, wrong, lambda event, delta, relation: 1e-3)
    arguments = sets("privacy.unit=client", "privacy.noise_multiplier=1", "job.rounds=1")
    result = fedplat("simulate", *FAST, *arguments, "--out", "run")
    assert result.code == 1 and "Don't use either" in result.err
    assert read_events(Path("run/events.jsonl")) == []


def test_an_epsilon_that_protects_nobody_is_warned_about(fedplat, caplog):
    arguments = sets("privacy.unit=client", "privacy.noise_multiplier=0.05", "privacy.sampling=none", "job.rounds=1")
    result = fedplat("simulate", *FAST, *arguments)
    assert result.code == 0 and "which protects nobody" in result.err + caplog.text
    assert (
        "must be at least 0.001"
        in fedplat("simulate", *sets("privacy.unit=sample", "privacy.noise_multiplier=1e-30")).err
    )


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["privacy.unit=client", "privacy.noise_multiplier=2", "privacy.delta=0.1", "cohort.clients=50"], True),
        (["privacy.unit=client", "privacy.noise_multiplier=2", "privacy.delta=0.001", "cohort.clients=50"], False),
        (["privacy.unit=sample", "privacy.noise_multiplier=2", "privacy.sample_rate=0.01", "privacy.delta=0.01"], True),
        (
            ["privacy.unit=sample", "privacy.noise_multiplier=2", "privacy.sample_rate=0.01", "privacy.delta=1e-5"],
            False,
        ),
    ],
)
def test_a_job_for_sites_is_checked_for_its_delta_too(settings, warned, fedplat):
    result = fedplat("job", "run-config", *sets("privacy.noise_multiplier=2", *settings))
    assert result.code == 0 and result.out.startswith("job = ")
    assert ("is not below 1/" in result.err) == warned
