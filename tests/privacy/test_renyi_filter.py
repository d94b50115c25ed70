"""The Rényi filter: never beyond its budget, whatever is asked in whatever order; sound beside exact composition."""

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import dp_event, rdp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedplat.errors import UsageError
from privacy import events
from privacy.accounting import epsilon
from privacy.renyi_filter import (
    ORDERS,
    SLACK_SHARE,
    RenyiBudget,
    best_order,
    charge_of,
    conversion,
    truncation_slack,
)

budgets = st.tuples(st.floats(0.5, 20), st.sampled_from([1e-4, 1e-5, 1e-6, 1e-9])).map(
    lambda pair: RenyiBudget(*pair, best_order(*pair))
)


def spend(budget: RenyiBudget, charges) -> tuple[float, float, list[int]]:
    """Ask for each in turn; what is refused is not spent."""
    spent, slack, admitted = 0.0, 0.0, []
    for number, (asked, asked_slack) in enumerate(charges):
        if budget.admits(spent, asked, slack, asked_slack):
            spent, slack = spent + asked, slack + asked_slack
            admitted.append(number)
    return spent, slack, admitted


amounts = st.one_of(st.floats(0, 5), st.sampled_from([math.inf, math.nan, -1.0, 1e-300]))
slacks = st.one_of(st.just(0.0), st.floats(0, 1e-6), st.sampled_from([math.inf, -1e-9]))


@given(budgets, st.lists(st.tuples(amounts, slacks), max_size=60))
@settings(deadline=None)
def test_no_sequence_of_requests_exceeds_the_budget(budget, charges):
    spent, slack, _ = spend(budget, charges)
    assert 0 <= spent <= budget.capacity
    assert 0 <= slack <= SLACK_SHARE * budget.delta
    assert budget.epsilon_of(spent) <= budget.epsilon + 1e-12 * budget.epsilon


@given(budgets, st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_a_caller_who_sees_what_is_left_gains_nothing(budget, seed):
    """Adaptive: each request is chosen from what is left, up to exactly all of it."""
    rng, spent = np.random.default_rng(seed), 0.0
    for _ in range(50):
        asked = (budget.capacity - spent) * rng.choice([0.3, 1.0, 1.0 + 1e-15, 1.5])
        if budget.admits(spent, asked):
            spent += asked
    assert spent <= budget.capacity
    assert not budget.admits(spent, budget.capacity)


def test_capacity_and_conversion_are_inverse():
    budget = RenyiBudget(3.0, 1e-5, 8.0)
    alpha, kept = 8.0, 0.99e-5
    by_hand = 3.0 - (math.log((alpha - 1) / alpha) - (math.log(kept) + math.log(alpha)) / (alpha - 1))
    assert budget.capacity == pytest.approx(by_hand, rel=1e-12)
    assert budget.epsilon_of(budget.capacity) == pytest.approx(3.0, rel=1e-12)
    library, _ = rdp.compute_epsilon([alpha], [budget.capacity], kept)
    assert library == pytest.approx(3.0, rel=1e-12)


def test_nothing_spent_is_nothing_and_something_has_a_floor():
    budget = RenyiBudget(3.0, 1e-5, 8.0)
    assert budget.epsilon_of(0.0) == 0.0
    assert budget.epsilon_of(1e-9) == pytest.approx(conversion(8.0, 1e-5), abs=1e-6)
    with pytest.raises(ValueError, match="≥ 0"):
        budget.epsilon_of(-1e-3)


@given(st.floats(0.3, 30), st.sampled_from([1e-3, 1e-5, 1e-7, 1e-10]))
@settings(deadline=None)
def test_the_default_order_admits_most_gaussians(total, delta):
    order = best_order(total, delta)
    for other in ORDERS:
        if total > conversion(other, delta):
            assert (
                RenyiBudget(total, delta, order).capacity / order >= RenyiBudget(total, delta, other).capacity / other
            )


@pytest.mark.parametrize("total", [1.0, 4.0, 10.0, 20.0, 50.0, 200.0])
def test_the_default_order_has_a_finite_cost_for_ordinary_training(total):
    """Below order 2 dp-accounting has no finite bound for most of these: a large budget would refuse everything."""
    budget = RenyiBudget(total, 1e-6, best_order(total, 1e-6))
    for rate in (0.001, 0.01, 0.1, 0.3, 0.5, 0.9):
        for noise in (0.5, 1.0, 3.0, 20.0, 100.0):
            assert 0 < charge_of(events.dp_sgd(rate, noise, 1), budget, "add-remove").rdp < math.inf


@given(st.sampled_from(ORDERS), st.floats(1e-3, 0.99), st.floats(0.4, 200.0))
@example(2.5, 0.5, 100.0)
@example(2.5, 0.3, 100.0)
@settings(deadline=None)
def test_a_cost_lies_between_those_of_the_whole_orders_around_it(order, rate, noise):
    """dp-accounting's own figure at order 2.5 is infinite at q = 0.5, z = 100, and 55 times too high at q = 0.3."""
    low, cost, high = (
        charge_of(events.dp_sgd(rate, noise, 1), RenyiBudget(200.0, 1e-6, whole), "add-remove").rdp
        for whole in (float(math.floor(order)), order, float(math.ceil(order)))
    )
    assert low * (1 - 1e-9) - 1e-12 <= cost <= high * (1 + 1e-9) + 1e-12  # tiny costs are differences of logarithms


jobs = st.lists(st.tuples(st.floats(0.005, 0.1), st.floats(0.8, 3.0), st.integers(10, 500)), min_size=1, max_size=5)


@given(jobs)
@settings(deadline=None, max_examples=8)
def test_the_filters_epsilon_dominates_exact_composition(schedules):
    budget = RenyiBudget(8.0, 1e-5, best_order(8.0, 1e-5))
    charges = [(charge_of(events.dp_sgd(*job), budget, "add-remove").rdp, 0.0) for job in schedules]
    spent, _, admitted = spend(budget, charges)
    if admitted:
        together = dp_event.ComposedDpEvent([events.dp_sgd(*schedules[i]) for i in admitted])
        assert epsilon(together, 1e-5) <= budget.epsilon_of(spent) + 0.005


def test_a_budget_of_four_admits_fewer_jobs_than_exact_composition_would():
    """PRIVACY.md 3.4: 28 jobs by RDP with the best order afterwards, 36 by PLD. One declared order: no more than 28."""
    budget = RenyiBudget(4.0, 1e-5, best_order(4.0, 1e-5))
    noises = [1.0 + i / 100 for i in range(50)]
    charges = [(charge_of(events.dp_sgd(0.01, noise, 200), budget, "add-remove").rdp, 0.0) for noise in noises]
    _, _, admitted = spend(budget, charges)
    assert 20 <= len(admitted) <= 28


# --- truncated Poisson -----------------------------------------------------------------------------------------------


def exact_tail(n: int, q: Fraction, most: int) -> Fraction:
    return sum((math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(most + 1, n + 1)), Fraction(0))


@pytest.mark.parametrize(
    ("n", "q", "most"), [(20, Fraction(1, 10), 5), (60, Fraction(1, 4), 30), (200, Fraction(1, 50), 30)]
)
def test_slack_is_the_formula_in_exact_arithmetic(n, q, most):
    expected = (1 + math.exp(2.0)) * 7 * float(exact_tail(n, q, most))
    assert truncation_slack(n, float(q), most, 7, 2.0) == pytest.approx(expected, rel=1e-9)


@given(st.integers(5, 12), st.floats(0.05, 0.6), st.floats(0.05, 3.0))
@settings(deadline=None, max_examples=40)
def test_the_coupling_bound_holds_on_a_mechanism_that_can_be_computed(n, q, level):
    """All data are ones; D' has one record zeroed. Release: the truncated sum plus geometric noise, exactly summed."""
    most = max(1, n // 3)
    plain, cut = _sum_distributions(n, q, n), _sum_distributions(n, q, most)
    delta = _hockey_stick(*plain, level)
    slack = truncation_slack(n, q, most, 1, level)
    assert _hockey_stick(*cut, level) <= delta + slack + 1e-12


def _sum_distributions(n: int, q: float, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the noised sum on D (n ones) and on D' (one of them zeroed, but still sampled), cut at `most` at random."""
    here, there = np.zeros(n + 1), np.zeros(n + 1)
    for size in range(n + 1):
        chance, kept = math.comb(n, size) * q**size * (1 - q) ** (n - size), min(size, most)
        here[kept] += chance
        zeroed_kept = kept / n  # by symmetry, the zeroed record is among the kept ones this often
        there[kept] += chance * (1 - zeroed_kept)
        if kept:
            there[kept - 1] += chance * zeroed_kept
    noise = 0.5 ** np.abs(np.arange(-40, 41))
    noise /= noise.sum()
    return np.convolve(here, noise), np.convolve(there, noise)


def _hockey_stick(first: np.ndarray, second: np.ndarray, level: float) -> float:
    one_way = np.maximum(first - math.exp(level) * second, 0).sum()
    return float(max(one_way, np.maximum(second - math.exp(level) * first, 0).sum()))


def test_truncated_sampling_is_charged_as_plain_sampling_plus_slack():
    budget = RenyiBudget(3.0, 1e-5, best_order(3.0, 1e-5))
    plain = charge_of(events.dp_sgd(256 / 60000, 1.1, 2344), budget, "zero-out")
    cut = charge_of(events.truncated_dp_sgd(60_000, 256 / 60000, 400, 1.1, 2344), budget, "zero-out")
    assert (cut.rdp, plain.slack) == (plain.rdp, 0.0)
    assert 0 < cut.slack < budget.slack_capacity
    assert budget.admits(0.0, cut.rdp, 0.0, cut.slack)
    tight = charge_of(events.truncated_dp_sgd(60_000, 256 / 60000, 300, 1.1, 2344), budget, "zero-out")
    assert not budget.admits(0.0, tight.rdp, 0.0, tight.slack)
    with pytest.raises(UsageError, match="account it as zero-out"):
        charge_of(events.truncated_dp_sgd(60_000, 256 / 60000, 400, 1.1, 2344), budget, "add-remove")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1e-5, 8.0), "ε must be"),
        ((-1.0, 1e-5, 8.0), "ε must be"),
        ((math.inf, 1e-5, 8.0), "ε must be"),
        ((1.0, 0.0, 8.0), "δ must be"),
        ((1.0, 1.0, 8.0), "δ must be"),
        ((1.0, 1e-5, 1.0), "not one of those allowed"),
        ((50.0, 1e-6, 1.85), "not one of those allowed"),
        ((1.0, 1e-5, 7.77), "not one of those allowed"),
        ((0.5, 1e-5, 4.0), "Leave the order out"),
        ((1e-4, 1e-9, 1024.0), "Raise ε above"),
    ],
)
def test_budgets_that_can_not_be_are_refused_with_advice(arguments, message):
    with pytest.raises(UsageError, match=message):
        RenyiBudget(*arguments)


def test_a_budget_too_small_for_any_order_is_refused():
    with pytest.raises(UsageError, match="Raise ε above"):
        best_order(1e-4, 1e-9)
