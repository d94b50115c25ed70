"""Strategies by name: any of `flwr.serverapp.strategy`, ours, or anyone's own class.

The driver owns sampling and the names of records, so those arguments are not the job's to set.
A wrong argument is found here, before anything starts.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import flwr.serverapp.strategy as flower_strategies
from flwr.serverapp.strategy import Strategy

from fedplat import wire
from fedplat.arguments import bind_arguments
from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.tasks import find_class
from server_app.cohort import require_cohorts
from server_app.scaffold import Scaffold

_OURS: dict[str, type[Strategy]] = {"Scaffold": Scaffold}
MEAN_BASED = frozenset({"FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedProx", "Scaffold"})
"""Strategies that see updates only through their weighted mean: `server_app.mean` reduces for them."""
CLIENT_LEVEL = MEAN_BASED - {"Scaffold"}
"""Strategies that can have privacy.unit = 'client': what they see is what `server_app.private_mean` released."""

_OWNED = {
    "fraction_train": "set cohort.fraction or cohort.size",
    "fraction_evaluate": "set evaluation.clients",
    "min_train_nodes": "set cohort.min_replies",
    "min_evaluate_nodes": "set evaluation.clients",
    "min_available_nodes": "set cohort.clients",
    "weighted_by_key": "updates are weighted by their number of examples",
    "arrayrecord_key": "record names are part of fedplat's protocol",
    "configrecord_key": "record names are part of fedplat's protocol",
    "train_loss_key": "record names are part of fedplat's protocol",
}
_FLOATS_ONLY = frozenset({"QFedAvg"})
_NO_BOOLEANS = frozenset({"FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "QFedAvg"})
_REFUSED = {
    "FedXgbBagging": "it aggregates XGBoost trees, and fedplat's tasks are PyTorch models",
    "FedXgbCyclic": "it aggregates XGBoost trees, and fedplat's tasks are PyTorch models",
    **dict.fromkeys(
        (
            "DifferentialPrivacyClientSideAdaptiveClipping",
            "DifferentialPrivacyClientSideFixedClipping",
            "DifferentialPrivacyServerSideAdaptiveClipping",
            "DifferentialPrivacyServerSideFixedClipping",
        ),
        "its noise is seedable and under-calibrated when clients drop out, so its privacy can't be claimed",
    ),
}


def strategy_names() -> list[str]:
    """The strategies that a job can name: Flower's and ours."""
    exported = (getattr(flower_strategies, name) for name in flower_strategies.__all__)
    classes = [c for c in exported if isinstance(c, type) and issubclass(c, Strategy) and c is not Strategy]
    return sorted([*_OURS, *(c.__name__ for c in classes if c.__name__ not in _REFUSED)])


def build_strategy(job: Job) -> Strategy:
    """The job's strategy, constructed. Raises UsageError for anything that would not run."""
    name, args = job.server.strategy, job.server.args
    if name in _REFUSED:
        raise UsageError(f"server.strategy = '{name}' is not offered: {_REFUSED[name]}")
    for argument in args:
        if argument in _OWNED:
            raise UsageError(f"server.args.{argument} is fedplat's to set: {_OWNED[argument]}")
    names = strategy_names()
    cls = _built_in(name) if name in names else find_class(name, "strategy", names)
    if not issubclass(cls, Strategy):
        raise UsageError(f"strategy {name}: not a subclass of flwr.serverapp.strategy.Strategy")
    _require_private(job)
    _require_sane(job)
    accepted = inspect.signature(cls).parameters
    filled = {key: value for key, value in _filled_in(job).items() if key in accepted}
    bind_arguments(cls, {**_optional(name, job), **args}, "server.args", reserved=filled)
    try:
        strategy: Strategy = cls(**{**_optional(name, job), **args, **filled})
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"server.args: {name} refused them: {error}") from None
    return strategy


def _require_private(job: Job) -> None:
    """Refuse strategies that would see more than a private job releases."""
    name = job.server.strategy
    if job.privacy is None:
        return
    if name == "QFedAvg":
        raise UsageError("server.strategy = 'QFedAvg' weighs clients by their training loss, which private ones keep")
    if job.privacy.unit == "client" and name not in CLIENT_LEVEL:
        raise UsageError(
            f"server.strategy = '{name}' can't have privacy.unit = 'client': it looks at single updates, so its result "
            f"isn't bounded by the clip norm as a mean is. Use one of {', '.join(sorted(CLIENT_LEVEL))}"
        )
    require_cohorts(job)


def _require_sane(job: Job) -> None:
    """What Flower would only find out, or not even notice, in the middle of a run."""
    for argument, value in job.server.args.items():
        if argument in ("num_malicious_nodes", "proximal_mu") and isinstance(value, int | float) and value < 0:
            raise UsageError(f"server.args.{argument} must be ≥ 0 (got {value})")
    malicious = job.server.args.get("num_malicious_nodes", 0)
    if job.server.strategy == "Bulyan" and isinstance(malicious, int) and 4 * malicious + 3 > job.cohort.cohort_size:
        raise UsageError(
            f"Bulyan needs 4 · num_malicious_nodes + 3 = {4 * malicious + 3} clients per round, the cohort has "
            f"{job.cohort.cohort_size}: raise cohort.size"
        )


def require_dtypes(job: Job, dtypes: Mapping[str, str]) -> None:
    """Refuse tensors that the strategy's arithmetic can't do (it would fail in the first round)."""
    for name, dtype in dtypes.items():
        unfit = (dtype == "bool" and job.server.strategy in _NO_BOOLEANS) or (
            not dtype.startswith("float") and job.server.strategy in _FLOATS_ONLY
        )
        if unfit:
            raise UsageError(
                f"strategy {job.server.strategy} can't aggregate '{name}' ({dtype}): freeze it, or use FedAvg"
            )


def _built_in(name: str) -> type:
    found: type = _OURS[name] if name in _OURS else getattr(flower_strategies, name)
    return found


def _filled_in(job: Job) -> dict[str, Any]:
    """The strategy sees a Grid with just the cohort, so it takes every node that it sees."""
    if job.is_scaffold:
        return {"num_clients": job.cohort.clients}
    return {
        "fraction_train": 1.0,
        "fraction_evaluate": 1.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": 1,
        "weighted_by_key": wire.NUM_EXAMPLES,
        "arrayrecord_key": wire.ARRAYS,
        "configrecord_key": wire.CONFIG,
    }


def _optional(name: str, job: Job) -> dict[str, Any]:
    """Arguments that Flower requires and the job already knows."""
    if name == "QFedAvg":
        return {"client_learning_rate": job.local.lr, "train_loss_key": "loss"}
    return {}
