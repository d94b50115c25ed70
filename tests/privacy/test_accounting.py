"""Accountants: their order, their relations, their table, and the running ε against composition from scratch."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event, pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedplat.errors import JobError, UsageError
from privacy import accounting, events
from privacy.accountants import running as running_module
from privacy.accountants.rdp import DEFAULT_ORDERS
from privacy.accountants.running import least_epsilon
from privacy.accountants.support import leaves_of
from privacy.accounting import (
    ACCOUNTANTS,
    RELATIONS,
    SUPPORT,
    AccountantsDisagree,
    NotTaken,
    RunningEpsilon,
    epsilon,
    epsilons,
    group_epsilon,
    rdp_curve,
    support_table,
)

MNIST = {"sample_rate": 256 / 60000, "noise_multiplier": 1.1, "steps": 2344}
DELTA = 1e-5

sane = st.tuples(st.floats(1e-3, 0.2), st.floats(0.7, 4.0), st.integers(1, 2000), st.sampled_from([1e-5, 1e-6, 1e-8]))


@given(sane)
@settings(deadline=None, max_examples=6)
def test_accountants_stand_in_their_known_order(schedule):
    rate, noise, steps, delta = schedule
    found = epsilons(events.dp_sgd(rate, noise, steps), delta)  # raises if they disagree
    assert 0 <= found.pld <= found.rdp + accounting.RDP_TOLERANCE
    assert found.prv is None or abs(found.pld - found.prv) <= accounting.PRV_TOLERANCE
    assert (found.claimed, found.claimed_by) == (found.pld, "pld")


@given(st.floats(0.5, 20.0), st.integers(1, 50))
@settings(deadline=None, max_examples=20)
def test_gaussians_compose_exactly(noise, count):
    many, one = events.gaussian(noise, count), events.gaussian(noise / math.sqrt(count))
    ((leaf, times),) = leaves_of(many).items()
    assert (leaf.noise_multiplier, times) == (pytest.approx(noise / math.sqrt(count)), 1)
    assert epsilon(many, DELTA, accountant="rdp") == pytest.approx(epsilon(one, DELTA, accountant="rdp"), rel=1e-9)


def test_several_releases_from_one_sample_are_one():
    pair = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(2.0), dp_event.GaussianDpEvent(3.0)])
    joint = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, pair), 100)
    single = events.dp_sgd(0.01, (1 / 4 + 1 / 9) ** -0.5, 100)
    assert epsilon(joint, DELTA) == pytest.approx(epsilon(single, DELTA), rel=1e-9)


# --- relations: the trap is normalised in one place ------------------------------------------------------------------


def test_replace_one_doubles_the_sensitivity_for_every_accountant():
    one = events.gaussian(1.0)
    found = epsilons(one, DELTA, "replace-one")
    half = epsilons(events.gaussian(0.5), DELTA, "add-remove")
    assert (found.pld, found.rdp, found.prv) == pytest.approx((half.pld, half.rdp, half.prv), abs=1e-3)
    assert found.pld == pytest.approx(9.997, abs=1e-3)
    # The trap: dp-accounting's RDP under REPLACE_ONE gives the figure of add-remove.
    naive = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE).compose(one).get_epsilon(DELTA)
    assert naive == pytest.approx(4.7285, abs=1e-3)


def test_a_fixed_size_sample_is_charged_for_twice_the_clip_norm():
    found = epsilons(events.fixed_cohort(60_000, 256, 1.1, 2344), DELTA, "replace-one")
    assert found.claimed == pytest.approx(11.96, abs=0.01)
    assert (found.claimed_by, found.witnesses, len(found.notes)) == ("rdp", 1, 2)
    assert epsilon(events.dp_sgd(**MNIST), DELTA, "replace-one") == pytest.approx(1.54, abs=0.01)


def test_laplace_under_replace_one_gets_half_the_noise():
    whole = epsilon(events.event_from_json({"kind": "laplace", "noise_multiplier": 1.0}), DELTA, "add-remove", "rdp")
    twice = epsilon(events.event_from_json({"kind": "laplace", "noise_multiplier": 2.0}), DELTA, "replace-one", "rdp")
    assert twice == pytest.approx(whole, rel=1e-9)


def test_zero_out_has_the_figures_of_add_remove():
    event = events.dp_sgd(0.01, 1.0, 200)
    ours, theirs = epsilons(event, DELTA, "zero-out"), epsilons(event, DELTA, "add-remove")
    assert (ours.pld, ours.rdp, ours.prv) == (theirs.pld, theirs.rdp, theirs.prv)
    assert ours.relation == "zero-out"


# --- the table -------------------------------------------------------------------------------------------------------

GAUSSIAN, LAPLACE = dp_event.GaussianDpEvent(1.5), dp_event.LaplaceDpEvent(3.0)
EXAMPLES = {
    "Gaussian": GAUSSIAN,
    "Laplace": LAPLACE,
    "Poisson-sampled Gaussian": dp_event.PoissonSampledDpEvent(0.1, GAUSSIAN),
    "Poisson-sampled Laplace": dp_event.PoissonSampledDpEvent(0.1, LAPLACE),
    "Gaussian on a fixed-size sample": dp_event.SampledWithoutReplacementDpEvent(100, 10, GAUSSIAN),
    "zCDP": dp_event.ZCDpEvent(0.1),
    "truncated Poisson-sampled Gaussian": dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 30, 1.5),
    "mixture of Gaussians": dp_event.MixtureOfGaussiansDpEvent(4.0, (0.0, 1.0), (0.9, 0.1)),
    "repeat and select": dp_event.RepeatAndSelectDpEvent(GAUSSIAN, 5.0, 1.0),
    "non-private": dp_event.NonPrivateDpEvent(),
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", SUPPORT)
def test_the_table_is_what_accountants_do(kind, relation):
    takers = [name for name in ACCOUNTANTS if relation in SUPPORT[kind][name]]
    if not takers:
        with pytest.raises(UsageError, match="no accountant takes"):
            epsilons(EXAMPLES[kind], DELTA, relation)
        return
    found = epsilons(EXAMPLES[kind], DELTA, relation)
    assert [name for name in ACCOUNTANTS if getattr(found, name) is not None] == takers
    assert found.witnesses == len(takers)
    assert found.claimed > 0
    for name in set(ACCOUNTANTS) - set(takers) - {"pld"}:
        with pytest.raises(UsageError, match=f"no ε by {name}"):
            epsilon(EXAMPLES[kind], DELTA, relation, name)


def test_the_table_can_be_printed():
    lines = support_table().splitlines()
    assert len(lines) == 2 + len(SUPPORT)
    assert "| truncated Poisson-sampled Gaussian | zero-out | – | – | zero-out |" in lines


def test_a_mixed_composition_is_refused_if_no_accountant_takes_all_of_it():
    mixed = dp_event.ComposedDpEvent([EXAMPLES["zCDP"], EXAMPLES["mixture of Gaussians"]])
    with pytest.raises(UsageError, match="no accountant takes"):
        epsilons(mixed, DELTA)


def test_unknown_relation_and_bad_delta_are_refused():
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="δ must be"):
            epsilons(GAUSSIAN, delta)
    with pytest.raises(UsageError, match="unknown neighbouring relation"):
        epsilons(GAUSSIAN, DELTA, "neighbours")


def test_nothing_costs_nothing_and_no_noise_costs_everything():
    assert epsilons(dp_event.NoOpDpEvent(), DELTA).claimed == 0
    assert epsilons(dp_event.ComposedDpEvent([GAUSSIAN, dp_event.NonPrivateDpEvent()]), DELTA).claimed == math.inf


def test_tiny_costs_are_never_negative():
    found = epsilons(events.dp_sgd(1e-6, 20.0, 1), 1e-3)
    assert min(found.pld, found.rdp, found.prv) >= 0


def test_a_delta_below_the_rounding_of_transforms_is_left_to_rdp():
    found = epsilons(events.dp_sgd(0.01, 1.0, 100), 1e-13)
    assert (found.pld, found.claimed_by) == (None, "rdp")


@pytest.mark.parametrize(("liar", "factor"), [("rdp", 0.5), ("prv", 0.5), ("prv", 2.0), ("pld", 2.0)])
def test_accountants_out_of_order_give_no_figure(monkeypatch, liar, factor):
    honest = accounting._EPSILON_BY[liar]
    lies = {**accounting._EPSILON_BY, liar: lambda *arguments: factor * honest(*arguments)}
    monkeypatch.setattr(accounting, "_EPSILON_BY", lies)
    with pytest.raises(AccountantsDisagree, match="report it as a bug") as raised:
        epsilons(events.dp_sgd(0.01, 1.0, 1000), DELTA)
    assert isinstance(raised.value, JobError)


def test_there_is_no_clt_accountant():
    for ask in (epsilon, epsilons):
        with pytest.raises(UsageError, match="unknown accountant 'gdp'"):
            ask(GAUSSIAN, DELTA, "add-remove", "gdp")


# --- numbers of PRIVACY.md -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_batch", "expected"),
    [
        pytest.param(300, 2.1666, marks=pytest.mark.slow),
        (320, 0.9441),
        pytest.param(350, 0.9190, marks=pytest.mark.slow),
    ],
)
def test_truncated_poisson(max_batch, expected):
    event = events.truncated_dp_sgd(60_000, MNIST["sample_rate"], max_batch, 1.1, 2344)
    assert epsilon(event, DELTA, "zero-out") == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("records", "expected"),
    [(1, 0.922), pytest.param(2, 1.981, marks=pytest.mark.slow), pytest.param(5, 5.622, marks=pytest.mark.slow)],
)
def test_user_level(records, expected):
    found = group_epsilon(**MNIST, records=records, delta=DELTA)
    assert found == pytest.approx(expected, abs=5e-3)
    assert found >= epsilon(events.dp_sgd(**MNIST), DELTA) - 1e-3


@pytest.mark.parametrize(
    ("mean", "shape", "expected"),
    [(10, math.inf, 5.75), (10, 1.0, 5.05), (10, 0.0, 4.30), (50, math.inf, 16.0), (50, 1.0, 6.0), (50, 0.0, 4.9)],
)
def test_best_of_several_runs(mean, shape, expected):
    """Papernot and Steinke 2022; keeping only the best of a random number of runs costs less than all of them."""
    base = events.dp_sgd(256 / 60000, 1.1, 14_062)
    every = dp_event.SelfComposedDpEvent(base, mean)
    found = epsilon(dp_event.RepeatAndSelectDpEvent(base, mean, shape), DELTA)
    assert epsilon(base, DELTA, accountant="rdp") == pytest.approx(2.597, abs=1e-3)
    assert found == pytest.approx(expected, abs=0.05)
    assert found < epsilon(every, DELTA, accountant="rdp")


@pytest.mark.slow
def test_fifty_different_jobs():
    jobs = dp_event.ComposedDpEvent([events.dp_sgd(0.01, 1.0 + i / 100, 200) for i in range(50)])
    assert epsilon(jobs, DELTA) == pytest.approx(4.446, abs=0.01)
    assert epsilon(jobs, DELTA, accountant="rdp") == pytest.approx(4.828, abs=0.005)


def shuffle_lower_bound(noise: float, steps: int, delta: float) -> float:
    """Chua et al. 2024: what one epoch of shuffled batches costs at least, from the set {some batch's sum ≥ C}."""
    threshold = np.linspace(0.5, 12, 4000)
    rest = (steps - 1) * stats.norm.logcdf(threshold / noise)
    present = -np.expm1(stats.norm.logcdf((threshold - 2) / noise) + rest)
    absent = -np.expm1(stats.norm.logcdf((threshold - 1) / noise) + rest)
    kept = present > delta
    return float(np.max(np.log((present[kept] - delta) / absent[kept])))


@pytest.mark.parametrize(
    ("noise", "steps", "delta", "poisson", "shuffled"),
    [
        pytest.param(0.5, 10_000, 1e-6, 1.953, 10.995, marks=pytest.mark.slow),
        (0.8, 1000, 1e-5, 0.304, 5.235),
        (1.1, 235, 1e-5, 0.306, 2.978),
    ],
)
def test_shuffled_batches_cost_far_more_than_poisson_says(noise, steps, delta, poisson, shuffled):
    claimed = epsilon(events.dp_sgd(1 / steps, noise, steps), delta)
    least = shuffle_lower_bound(noise, steps, delta)
    assert claimed == pytest.approx(poisson, abs=2e-3)
    assert least == pytest.approx(shuffled, abs=5e-3)
    # What we say for a shuffled epoch, no amplification, covers it. There is no event to say less with.
    assert claimed < least <= epsilon(events.gaussian(noise), delta)
    assert not any("shuffle" in kind for kind in events.KINDS)


# --- RDP curves ------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 0.5), st.floats(0.6, 5), st.integers(1, 10_000))
@settings(deadline=None, max_examples=15)
def test_rdp_curves_scale_exactly_and_add_up(rate, noise, steps):
    orders = (1.5, 2.0, 8.0, 32.0)
    one, many = events.dp_sgd(rate, noise, 1), events.dp_sgd(rate, noise, steps)
    np.testing.assert_array_equal(rdp_curve(many, orders), steps * rdp_curve(one, orders))
    both = dp_event.ComposedDpEvent([many, events.gaussian(3.0, 2)])
    np.testing.assert_allclose(rdp_curve(both, orders), rdp_curve(many, orders) + 2 * np.array(orders) / 18, rtol=1e-12)


def test_a_returned_curve_can_be_changed_without_harm():
    event = events.dp_sgd(0.01, 1.0, 1)
    first = rdp_curve(event, (2.0, 4.0))
    first += 1
    assert (rdp_curve(event, (2.0, 4.0)) < 1).all()


def test_repeat_and_select_at_one_order_uses_the_whole_curve():
    event = dp_event.RepeatAndSelectDpEvent(events.dp_sgd(0.01, 1.0, 100), 10.0, 1.0)
    whole = rdp_curve(event, DEFAULT_ORDERS)
    assert rdp_curve(event, (8.0,))[0] == whole[DEFAULT_ORDERS.index(8.0)]


def test_rdp_says_what_it_does_not_take():
    with pytest.raises(NotTaken, match="RDP does not take truncated Poisson-sampled Gaussian under zero-out"):
        rdp_curve(EXAMPLES["truncated Poisson-sampled Gaussian"], (2.0,), "zero-out")


# --- running ε -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (events.dp_sgd(0.004, 1.1, 1), "add-remove"),
        (events.dp_sgd(0.01, 1.0, 10), "add-remove"),
        (events.dp_sgd(0.05, 1.5, 2), "zero-out"),
        pytest.param(events.dp_sgd(0.01, 1.0, 1), "replace-one", marks=pytest.mark.slow),
        pytest.param(events.dp_sgd(1e-4, 0.5, 1), "add-remove", marks=pytest.mark.slow),
        (events.gaussian(20.0, 3), "replace-one"),
        pytest.param(EXAMPLES["truncated Poisson-sampled Gaussian"], "zero-out", marks=pytest.mark.slow),
        (dp_event.ComposedDpEvent([events.dp_sgd(0.01, 2.0, 5), events.gaussian(50.0)]), "add-remove"),
    ],
)
def test_running_epsilon_equals_composition_from_scratch(event, relation):
    running = RunningEpsilon(event, DELTA, relation)
    for rounds in (1, 7, 1000):
        scratch = epsilon(dp_event.SelfComposedDpEvent(event, rounds), DELTA, relation)
        releases = rounds * sum(leaves_of(event).values())
        interval = running_module.INTERVALS[running._level]
        assert running.after(rounds) == pytest.approx(scratch, abs=1e-3 + 2 * releases * interval**2)
        assert running.after(rounds) >= scratch - 1e-3


def test_running_epsilon_counts_rounds_and_grows():
    running = RunningEpsilon(events.dp_sgd(0.01, 1.0, 5), DELTA)
    figures = [running.add() for _ in range(50)]
    assert running.rounds == 50
    assert figures == sorted(figures)
    assert figures[-1] == RunningEpsilon(events.dp_sgd(0.01, 1.0, 5), DELTA).after(50)
    assert running.after(0) == 0.0


def test_running_epsilon_by_rdp_is_rdp():
    event = events.dp_sgd(0.01, 1.0, 5)
    running = RunningEpsilon(event, DELTA, accountant="rdp")
    for rounds in (1, 10, 10_000):
        expected = epsilon(dp_event.SelfComposedDpEvent(event, rounds), DELTA, accountant="rdp")
        assert running.after(rounds) == pytest.approx(expected, rel=1e-12)


def test_running_epsilon_stays_within_its_memory_however_long_the_run():
    running = RunningEpsilon(events.dp_sgd(0.2, 1.0, 10), DELTA)
    last = running.after(10**6)
    assert math.isfinite(last)
    assert last <= RunningEpsilon(events.dp_sgd(0.2, 1.0, 10), DELTA, accountant="rdp").after(10**6)


def test_running_epsilon_refuses_what_it_can_not_do():
    with pytest.raises(NotTaken):
        RunningEpsilon(GAUSSIAN, DELTA, accountant="prv")
    with pytest.raises(NotTaken):
        RunningEpsilon(EXAMPLES["mixture of Gaussians"], DELTA, accountant="rdp")
    with pytest.raises(NotTaken):
        RunningEpsilon(EXAMPLES["zCDP"], DELTA)
    assert RunningEpsilon(dp_event.NonPrivateDpEvent(), DELTA).after(1) == math.inf


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(-10, 10), st.sampled_from([1e-3, 0.05, 0.3]))
def test_least_epsilon_is_dp_accountings(weights, first, delta):
    total = math.fsum(weights)
    if total == 0:
        return
    mass = np.array(weights) / total * 0.999
    theirs = pld.pld_pmf.DensePLDPmf(0.1, first, mass, 1e-4, True).get_epsilon_for_delta(delta)
    assert least_epsilon(first, 0.1, mass, 1e-4, delta) == pytest.approx(theirs, abs=1e-9)
