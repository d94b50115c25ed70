"""Any Flower strategy can be named; a wrong argument is an error before anything starts."""

import pytest

from fedplat.errors import UsageError
from fedplat.events import RoundFinished, read_events
from fedplat.summary import summarise
from server_app.strategies import build_strategy, strategy_names

ARGUMENTS = {
    "FedAdam": {"eta": 0.05},
    "FedAdagrad": {"eta": 0.05},
    "FedYogi": {"eta": 0.05},
    "FedAvgM": {"server_momentum": 0.5, "server_learning_rate": 0.9},
    "FedProx": {"proximal_mu": 0.1},
    "QFedAvg": {"q": 0.2},
    "Krum": {"num_malicious_nodes": 1},
    "FedTrimmedAvg": {"beta": 0.2},
}


def test_the_promised_strategies_are_offered():
    promised = {"FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedProx", "FedMedian", "FedTrimmedAvg", "Krum", "Bulyan"}
    assert promised <= set(strategy_names())


@pytest.mark.parametrize("name", strategy_names())
def test_every_offered_strategy_trains(name, tiny_job, simulated):
    iid = {"data__partition": {"kind": "iid"}, "cohort__fraction": 1.0, "job__rounds": 12}
    run = simulated(tiny_job(server__strategy=name, server__args=ARGUMENTS.get(name, {}), **iid))
    rounds = [e for e in read_events(run.events_file) if isinstance(e, RoundFinished)]
    assert all(e.aggregated for e in rounds)
    measured = summarise(run).server
    assert measured[12]["accuracy"] > measured[0]["accuracy"] + 0.2


@pytest.mark.parametrize(
    ("strategy", "args", "message"),
    [
        ("FedAvgg", {}, "did you mean 'FedAvg'"),
        ("FedAvgg", {}, "Valid: Bulyan, FedAdagrad"),
        ("FedAdam", {"etta": 0.1}, "unknown argument 'etta'.*did you mean 'eta'"),
        ("FedAdam", {"eta": "big"}, "server.args.eta must be float"),
        ("FedAdam", {"eta": True}, "server.args.eta must be float"),
        ("Krum", {"num_malicious_nodes": 1.5}, "must be int"),
        ("FedAvg", {"fraction_train": 0.5}, "set cohort.fraction"),
        ("FedAvg", {"train_metrics_aggr_fn": "f"}, "unknown argument"),
        ("FedXgbBagging", {}, "XGBoost"),
        ("DifferentialPrivacyServerSideFixedClipping", {}, "can't be claimed"),
        ("no.such.module:Strategy", {}, "can't import no.such.module"),
        ("fedplat.job:Job", {}, "not a subclass"),
        ("fedplat.job:Nothing", {}, "has no class Nothing"),
    ],
)
def test_a_wrong_strategy_or_argument_is_named_before_anything_starts(strategy, args, message, tiny_job):
    with pytest.raises(UsageError, match=message):
        build_strategy(tiny_job(server__strategy=strategy, server__args=args))


def test_fedprox_gives_its_mu_to_the_clients(tiny_job):
    assert tiny_job(server__strategy="FedProx", server__args={"proximal_mu": 0.3}).proximal_mu == 0.3
    with pytest.raises(UsageError, match="differ"):
        tiny_job(server__args={"proximal_mu": 0.3}, local__proximal_mu=0.2)
