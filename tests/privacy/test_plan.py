"""The plan: one public value from which trainer, sampler and accountant take their numbers."""

import logging

import pytest

from fedplat.errors import UsageError
from fedplat.job import Job, parse_job
from privacy.accounting import epsilon
from privacy.events import dp_sgd, gaussian
from privacy.plan import PrivacyPlan, pin_privacy, plan_privacy, steps_per_round
from privacy.renyi_filter import SLACK_SHARE, truncation_slack

SIZES = [200, 240, 400, 160, 238, 200]


@pytest.fixture
def private_job(tiny_job):
    def make(**settings: object) -> Job:
        privacy = {"unit": "sample", "epsilon": 4.0, "sample_rate": 0.1}
        given = {"local__steps": 4, "job__rounds": 5} | {f"privacy__{key}": value for key, value in privacy.items()}
        return tiny_job(**(given | settings))

    return make


@pytest.fixture
def planned(private_job):
    def make(**settings: object) -> PrivacyPlan:
        plan = plan_privacy(private_job(**settings))
        assert plan is not None
        return plan

    return make


def test_a_job_without_privacy_has_no_plan(tiny_job):
    assert plan_privacy(tiny_job()) is None
    assert pin_privacy(tiny_job(), SIZES, 3) == tiny_job()


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_noise_is_solved_for_the_target_and_hardly_more(target, accountant, planned):
    plan = planned(privacy__epsilon=target, privacy__accountant=accountant)
    assert target * 0.999 < plan.epsilon() <= target


def test_the_claim_covers_every_step_of_every_release(planned):
    """An independent derivation: rounds that a client may train, times steps, straight to the accountant."""
    plan = planned(privacy__spare_rounds=3, privacy__participations=4)
    assert (plan.releases, plan.steps) == (7, 4)
    assert plan.epsilon() == epsilon(dp_sgd(0.1, plan.noise_multiplier, 28), 1e-5)
    assert plan.epsilon(1) == epsilon(plan.round_event, 1e-5)
    assert plan.epsilon(1) < plan.epsilon(4) < plan.epsilon()


def test_spare_rounds_are_paid_for(planned):
    noises = [planned(privacy__spare_rounds=spare).noise_multiplier for spare in (0, 20)]
    assert noises[0] < noises[1]


def test_a_client_can_not_take_part_more_often_than_there_are_rounds(planned):
    assert planned(privacy__participations=1000, privacy__spare_rounds=0).releases == 5


def test_evaluations_are_part_of_the_claim(planned):
    settings = {"evaluation__clients": 0.5, "data__holdout": 0.2, "privacy__evaluation_noise": 20.0}
    silent = planned(privacy__epsilon=None, privacy__noise_multiplier=1.0)
    telling = planned(privacy__epsilon=None, privacy__noise_multiplier=1.0, **settings)
    assert (silent.evaluations, telling.evaluations) == (0, 7)  # five rounds and two spare ones
    assert telling.epsilon() > silent.epsilon()
    assert telling.evaluation_event == gaussian(20.0)
    with pytest.raises(ValueError, match="release no metrics"):
        _ = silent.evaluation_event
    solved = planned(**settings)
    assert 3.99 < solved.epsilon() <= 4.0


def test_an_adaptive_clip_norm_puts_its_count_and_its_sum_under_one_multiplier(planned):
    plan = planned(privacy__epsilon=None, privacy__noise_multiplier=1.0, privacy__adaptive={"count_noise": 0.8})
    assert plan.count_noise == 0.8 and plan.update_noise > plan.noise_multiplier == 1.0
    assert plan.update_noise**-2 + (2 * 0.8) ** -2 == pytest.approx(1.0)  # z⁻² adds up: sensitivities C and ½
    assert plan.epsilon() == planned(privacy__epsilon=None, privacy__noise_multiplier=1.0).epsilon()


def test_the_default_count_noise_always_leaves_room_for_the_sum(planned):
    for noise in (0.3, 1.0, 30.0, 300.0):
        plan = planned(privacy__epsilon=None, privacy__noise_multiplier=noise, privacy__adaptive={})
        assert noise < plan.update_noise < 2 * noise


def test_a_count_noise_that_costs_more_than_the_claim_is_refused(private_job):
    job = private_job(privacy__epsilon=None, privacy__noise_multiplier=2.0, privacy__adaptive={"count_noise": 0.9})
    with pytest.raises(UsageError, match=r"privacy\.adaptive\.count_noise"):
        plan_privacy(job)


def test_noise_that_does_not_suffice_is_refused_with_what_it_gives(private_job):
    with pytest.raises(UsageError, match=r"privacy.noise_multiplier = 0.5 gives ε = .*Leave noise_multiplier out"):
        plan_privacy(private_job(privacy__noise_multiplier=0.5, privacy__epsilon=1.0))
    assert plan_privacy(private_job(privacy__noise_multiplier=50.0)).noise_multiplier == 50.0


def test_a_job_that_does_not_say_its_sample_rate_has_no_plan(private_job):
    with pytest.raises(UsageError, match=r"privacy\.sample_rate is missing"):
        plan_privacy(private_job(privacy__sample_rate=None))


@pytest.mark.parametrize(("rate", "epochs", "steps"), [(0.1, 1, 10), (0.3, 1, 4), (1.0, 2, 2), (1 / 3, 3, 9)])
def test_an_epoch_is_one_over_the_sample_rate(rate, epochs, steps, private_job):
    job = private_job(local__steps=None, local__epochs=epochs, privacy__sample_rate=rate)
    assert steps_per_round(job, rate) == steps == plan_privacy(job).steps


TOO_MUCH = {
    "steps of a round": ({"local__steps": 1_000_001}, "1000001 private steps in a round"),
    "steps of a job": (
        {"local__steps": 900_000, "job__rounds": 10},
        "12 rounds of 900000 private steps are 10800000 in all: plan for at most 10000000. Lower",
    ),
    "epochs at a tiny rate": ({"local__steps": None, "privacy__sample_rate": 1e-7}, "private steps in a round"),
    "spare rounds": ({"privacy__spare_rounds": 1001}, "privacy.spare_rounds must be ≤ 1000"),
}


@pytest.mark.parametrize(("settings", "message"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_job_that_would_keep_an_accountant_busy_for_ever_is_refused(settings, message, private_job):
    with pytest.raises(UsageError) as refused:
        plan_privacy(private_job(**settings))
    assert message in str(refused.value)


def test_the_normaliser_is_the_jobs_and_not_the_datas(planned):
    assert planned(local__batch_size=12, local__accumulate=3).normaliser == 36
    assert planned(privacy__sample_rate=0.9, local__batch_size=12).normaliser == 12


def test_a_pinned_job_says_every_number_and_survives_its_file(private_job):
    job = private_job(privacy__sample_rate=None, local__steps=None, local__batch_size=24)
    pinned = pin_privacy(job, SIZES, participations=3)
    assert pinned.privacy.sample_rate == pytest.approx(24 / (sum(SIZES) / 6), rel=1e-5)
    assert pinned.privacy.participations == 3 and pinned.privacy.noise_multiplier is not None
    again = parse_job(pinned.to_toml())
    assert again == pinned and again.digest == pinned.digest
    assert plan_privacy(again) == plan_privacy(pinned)
    assert plan_privacy(again).epsilon() <= 4.0
    assert pin_privacy(pinned, [7, 8, 9], 50) == pinned  # what the job says is not asked of the data again


def test_a_given_noise_is_not_solved_again(private_job):
    job = private_job(privacy__epsilon=None, privacy__noise_multiplier=1.25)
    assert pin_privacy(job, SIZES, 3).privacy.noise_multiplier == 1.25


def test_a_batch_that_no_client_could_fill_is_refused(private_job):
    job = private_job(privacy__sample_rate=None, local__batch_size=500)
    with pytest.raises(UsageError, match="no client holds more than 400 examples"):
        pin_privacy(job, SIZES, 3)


def test_a_batch_larger_than_most_clients_makes_the_rate_one_and_says_so(private_job, caplog):
    with caplog.at_level(logging.WARNING):
        pinned = pin_privacy(private_job(privacy__sample_rate=None, local__batch_size=300), SIZES, 3)
    assert pinned.privacy.sample_rate == 1.0 and "sample_rate = 1" in caplog.text


@pytest.mark.parametrize(("delta", "warned"), [(0.01, True), (1 / 400, True), (1e-3, False)])
def test_a_delta_that_protects_nobody_is_warned_about(delta, warned, private_job, caplog):
    with caplog.at_level(logging.WARNING):
        pin_privacy(private_job(privacy__delta=delta, privacy__epsilon=None, privacy__noise_multiplier=1.0), SIZES, 3)
    assert ("not below 1/400 (examples at one site)" in caplog.text) == warned


def test_truncated_batches_pay_with_a_share_of_delta_under_zero_out(planned):
    plan = planned(privacy__max_batch=90)
    assert plan.relation == "zero-out"
    assert plan.conversion_delta == pytest.approx(1e-5 * (1 - SLACK_SHARE))
    slack = plan.truncation_slack(400)
    assert slack == truncation_slack(400, 0.1, 90, 4, 4.0) > 0
    assert slack * plan.releases <= SLACK_SHARE * 1e-5
    assert plan.truncation_slack(400, budget_epsilon=8.0) > slack == plan.truncation_slack(400, budget_epsilon=1.0)
    with pytest.raises(UsageError, match=r"privacy.max_batch = 90 is too small for 700 examples .* Raise it to about"):
        plan.truncation_slack(700)


@pytest.mark.parametrize("examples", [2, 50, 400, 5000])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.9, 1.0])
def test_the_batch_that_is_advised_is_accepted(examples, rate, planned):
    plan = planned(privacy__max_batch=1, privacy__sample_rate=rate, privacy__noise_multiplier=30.0)
    try:
        plan.truncation_slack(examples)
    except UsageError as error:
        advised = int(str(error).rsplit(" ", 1)[-1])
        again = planned(privacy__max_batch=advised, privacy__sample_rate=rate, privacy__noise_multiplier=30.0)
        assert again.truncation_slack(examples) >= 0


def test_without_truncation_there_is_no_slack(planned):
    assert planned().truncation_slack(10**6) == 0.0 and planned().relation == "add-remove"
