"""How differential privacy has failed elsewhere, and the test that fails here if it comes back.

The table is checked: every test it names exists. Failures that no other file is about are tested below it.
"""

import importlib
from pathlib import Path

import pytest

from fedplat.errors import UsageError
from fedplat.events import RoundFinished
from fedplat.job import Job
from privacy.accounting import epsilon
from privacy.events import dp_sgd
from privacy.plan import plan_privacy
from simulations.simulate import resume

FAILURES = {
    "accountant reset after a restart": (
        "client_app.test_spending",
        "test_no_restart_and_no_other_job_brings_a_budget_back",
    ),
    "accumulation counted as separate steps": (
        "privacy.test_known_failures",
        "test_accumulation_is_one_step_with_one_noise",
    ),
    "shuffling accounted as Poisson": (
        "privacy.test_accounting",
        "test_shuffled_batches_cost_far_more_than_poisson_says",
    ),
    "noise reused from a fixed seed": (
        "privacy.test_noise_added",
        "test_the_same_seeds_give_other_noise_unless_the_job_asks_for_insecure_noise",
    ),
    "noise shared by forked workers": (
        "privacy.test_randomness",
        "test_a_forked_child_never_continues_the_stream_of_its_parent",
    ),
    "clip disabled by NaN": (
        "client_app.test_clipping",
        "test_a_poisoned_example_contributes_nothing_or_at_most_the_clip_norm",
    ),
    "double spend by two jobs": (
        "privacy.test_ledger_concurrency",
        "test_processes_together_never_exceed_the_budget_and_every_grant_is_there",
    ),
    "ε printed for a model whose BatchNorm leaked": (
        "client_app.test_private_model",
        "test_a_model_that_would_leak_is_refused",
    ),
    "early stop on private data, not accounted": (
        "privacy.test_known_failures",
        "test_private_metrics_can_not_stop_a_run_for_free",
    ),
    "data set size used as public without saying so": (
        "client_app.test_private_handler",
        "test_a_private_reply_has_no_loss_no_size_and_no_time",
    ),
    "noise scaled by the actual batch": ("privacy.test_plan", "test_the_normaliser_is_the_jobs_and_not_the_datas"),
    "checkpoint resumed without its accountant": (
        "privacy.test_known_failures",
        "test_a_run_does_not_go_on_without_its_ledger",
    ),
    "last partial batch": ("privacy.test_known_failures", "test_there_is_no_last_partial_batch"),
    "a frozen layer that leaks through statistics": (
        "client_app.test_private_model",
        "test_a_frozen_batch_norm_is_accepted_only_if_its_statistics_are_frozen_too",
    ),
    "empty batches skipped": ("client_app.test_dp_sgd", "test_an_empty_batch_takes_a_noisy_step"),
    "pending gradient of an interrupted step": (
        "client_app.test_clipping",
        "test_an_interrupted_step_leaves_nothing_behind",
    ),
    "less noise when clients drop out": (
        "server_app.test_private_mean",
        "test_noise_does_not_depend_on_the_number_of_replies",
    ),
    "weights by number of examples": (
        "server_app.test_client_level",
        "test_a_hostile_client_loses_its_place_and_nothing_else",
    ),
    "restored backup of the ledger": ("privacy.test_ledger_tampering", "test_an_older_copy_is_refused_with_what_to_do"),
    "error text that quotes data": (
        "client_app.test_private_handler",
        "test_the_error_of_a_private_client_is_told_to_its_own_log_only",
    ),
    "an accountant that under-reports (CLT)": ("privacy.test_accounting", "test_there_is_no_clt_accountant"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_every_known_failure_has_its_test(failure: str):
    module, name = FAILURES[failure]
    assert callable(getattr(importlib.import_module(f"tests.{module}"), name, None)), f"{failure}: no {module}.{name}"


def private(tiny_job, **settings) -> Job:
    defaults = {"unit": "sample", "noise_multiplier": 1.0, "sample_rate": 0.1}
    return tiny_job(**{f"privacy__{key}": value for key, value in defaults.items()}, **settings)


def test_accumulation_is_one_step_with_one_noise(tiny_job):
    """Four micro-batches of 8 are one release of a batch of 32: same steps, same normaliser, same ε."""
    whole = plan_privacy(private(tiny_job, local__batch_size=32, local__steps=5))
    cut = plan_privacy(private(tiny_job, local__batch_size=8, local__accumulate=4, local__steps=5))
    assert whole is not None and cut is not None
    assert (whole.steps, whole.normaliser, whole.epsilon()) == (cut.steps, cut.normaliser, cut.epsilon())
    assert cut.epsilon() == epsilon(dp_sgd(0.1, 1.0, 5 * cut.releases), 1e-5)


def test_private_metrics_can_not_stop_a_run_for_free(tiny_job):
    """Targets and patience look at the public test set only; clients' own metrics are refused or paid for."""
    for watched in ({"evaluation__target": 0.5}, {"evaluation__patience": 2}):
        with pytest.raises(UsageError, match=r"need evaluation\.server = true"):
            private(tiny_job, evaluation__server=False, **watched)
    with pytest.raises(UsageError, match="a client's metrics are a release too"):
        private(tiny_job, data__holdout=0.3, evaluation__clients=1.0)
    paid = private(tiny_job, data__holdout=0.3, evaluation__clients=1.0, privacy__evaluation_noise=5.0)
    free = private(tiny_job)
    assert plan_privacy(paid).epsilon() > plan_privacy(free).epsilon()  # type: ignore[union-attr]


def test_there_is_no_last_partial_batch(tiny_job):
    """An epoch is ⌈1/q⌉ Poisson steps whatever a site holds, and each is divided by the same constant."""
    plan = plan_privacy(private(tiny_job, local__epochs=3, local__batch_size=7))
    assert plan is not None and plan.steps == 30 and plan.normaliser == 7


class _Killed(Exception):
    """Stands for a crash in the middle of a run."""


def test_a_run_does_not_go_on_without_its_ledger(tiny_job, simulated, tmp_path: Path):
    def kill(event: object) -> None:
        if isinstance(event, RoundFinished) and event.round == 2:
            raise _Killed

    from fedplat.errors import JobError
    from fedplat.rundir import RunDirectory

    with pytest.raises(JobError):
        simulated(private(tiny_job), "run", kill)
    run = RunDirectory(tmp_path / "run")
    ledger = run.ledger_file.read_bytes()
    run.ledger_file.unlink()
    with pytest.raises(UsageError, match="its ledger is gone"):
        resume(run)
    run.ledger_file.write_bytes(ledger)
