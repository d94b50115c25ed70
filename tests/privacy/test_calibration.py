"""Noise for a target: never too little, hardly too much."""

import pytest

from fedplat.errors import UsageError
from privacy import events
from privacy.accounting import epsilon
from privacy.calibration import _round_up, solve_noise


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta"),
    [(0.01, 1000, 2.0, 1e-5), (256 / 60000, 2344, 1.0, 1e-5), (0.05, 2000, 8.0, 1e-6), (1.0, 100, 1.0, 1e-5),
     (0.01, 1000, 0.05, 1e-5)],
)  # fmt: skip
def test_solved_noise_is_enough_and_a_thousandth_less_is_not(rate, steps, target, delta):
    def event(noise):
        return events.dp_sgd(rate, noise, steps)

    noise = solve_noise(event, target, delta)
    assert epsilon(event(noise), delta) <= target
    assert epsilon(event(noise * 0.999), delta) > target
    assert float(f"{noise:.4e}") == noise


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_accountant_that_claims_is_the_one_that_solves(accountant):
    def event(noise):
        return events.dp_sgd(0.01, noise, 500)

    noise = solve_noise(event, 1.0, 1e-5, accountant=accountant)
    assert epsilon(event(noise), 1e-5, accountant=accountant) <= 1.0
    assert epsilon(event(noise * 0.99), 1e-5, accountant=accountant) > 1.0
    assert noise > solve_noise(event, 1.0, 1e-5)


def test_a_fixed_cohort_can_be_solved():
    cohort = solve_noise(lambda z: events.fixed_cohort(1000, 50, z, 100), 4.0, 1e-5, "replace-one")
    assert epsilon(events.fixed_cohort(1000, 50, cohort, 100), 1e-5, "replace-one") <= 4.0


@pytest.mark.slow
def test_truncated_sampling_can_be_solved():
    truncated = solve_noise(lambda z: events.truncated_dp_sgd(10_000, 0.01, 180, z, 100), 1.0, 1e-5, "zero-out")
    assert epsilon(events.truncated_dp_sgd(10_000, 0.01, 180, truncated, 100), 1e-5, "zero-out") <= 1.0


def test_more_steps_need_more_noise():
    noises = [solve_noise(lambda z, n=n: events.gaussian(z, n), 1.0, 1e-5) for n in (1, 4, 16)]
    # Gaussians compose exactly: n releases need √n times the noise.
    assert noises == pytest.approx([noises[0], 2 * noises[0], 4 * noises[0]], rel=2e-4)


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_targets_are_refused(target):
    with pytest.raises(UsageError, match="ε must be"):
        solve_noise(lambda z: events.gaussian(z), target, 1e-5)


def test_a_target_out_of_reach_says_what_to_do():
    with pytest.raises(UsageError, match="Raise ε or δ, or plan fewer steps"):
        solve_noise(lambda z: events.gaussian(z, 10**12), 1e-3, 1e-5)


def test_next_to_no_noise_may_be_enough():
    noise = solve_noise(lambda z: events.dp_sgd(1e-7, z, 1), 1.0, 1e-5)
    assert epsilon(events.dp_sgd(1e-7, noise, 1), 1e-5) <= 1.0


def test_rounding_goes_up():
    assert [_round_up(x) for x in (1.0, 1.00001, 0.123456, 12345.6)] == [1.0, 1.0001, 0.12346, 12346.0]
