"""Mechanisms against theory: their laws, their privacy loss on neighbours, and clipping that nothing escapes.

Statistical tests fail by chance with a probability of at most 1e-6 each.
"""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import special, stats

from privacy.discrete import discrete_gaussian, poisson, rounded_laplace, skellam
from privacy.mechanisms import (
    DiscreteGaussian,
    Exponential,
    Gaussian,
    Laplace,
    MetricRelease,
    Skellam,
    clip_l2,
    noisy_count,
    noisy_mean,
)
from privacy.randomness import insecure_stream, secure_stream

FALSE_ALARM = 1e-7
N = 300_000
Z = 5.6
"""A normal is further out than this with probability 2e-8."""

Pmf = Callable[[np.ndarray], np.ndarray]


def gaussian_pmf(sigma: float) -> Pmf:
    reach = np.arange(-int(40 * sigma) - 5, int(40 * sigma) + 6)
    total = np.exp(-(reach**2) / (2 * sigma**2)).sum()
    return lambda k: np.exp(-(k**2) / (2 * sigma**2)) / total


def laplace_pmf(scale: float) -> Pmf:
    return lambda k: stats.laplace.cdf(k + 0.5, scale=scale) - stats.laplace.cdf(k - 0.5, scale=scale)


def chance_of(sample: np.ndarray, pmf: Pmf, expected: float = 20.0) -> float:
    """The chi-square p-value of a sample; integers expected less often than that share one cell."""
    k = np.arange(sample.min() - 3, sample.max() + 4)
    p = pmf(k)
    common = p * sample.size >= expected
    counts = np.array([(sample == value).sum() for value in k[common]])
    cells, weights = np.append(counts, sample.size - counts.sum()), np.append(p[common], 1 - p[common].sum())
    if weights[-1] * sample.size < expected:
        cells = np.append(cells[:-2], cells[-2:].sum())
        weights = np.append(weights[:-2], weights[-2:].sum())
    return float(stats.chisquare(cells, weights * sample.size).pvalue)


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.0, 2.5, 7.0, 16.0])
def test_discrete_gaussian_has_the_exact_probabilities(sigma):
    assert chance_of(discrete_gaussian(secure_stream(), N, sigma), gaussian_pmf(sigma)) > FALSE_ALARM


@pytest.mark.parametrize("mean", [0.02, 0.5, 1.0, 3.7, 15.5, 16.0, 40.5, 300.0])
def test_poisson_has_the_exact_probabilities(mean):
    assert chance_of(poisson(secure_stream(), N, mean), lambda k: stats.poisson.pmf(k, mean)) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 12.0])
def test_skellam_has_the_exact_probabilities(sigma):
    variance = sigma**2

    def pmf(k: np.ndarray) -> np.ndarray:
        return special.ive(np.abs(k), variance)  # e^-v I_k(v): scipy's skellam goes by another way

    assert chance_of(skellam(secure_stream(), N, sigma), pmf) > FALSE_ALARM


@pytest.mark.parametrize("scale", [1.0, 1.5, 4.0, 7.7])
def test_rounded_laplace_has_the_exact_probabilities(scale):
    assert chance_of(rounded_laplace(secure_stream(), N, scale), laplace_pmf(scale)) > FALSE_ALARM


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
def test_wide_integer_noise_is_nearly_continuous(draw):
    sigma = 2.0**20 * 1.1
    z = draw(secure_stream(), N, sigma) / sigma
    assert stats.kstest(z, "norm").pvalue > FALSE_ALARM
    assert abs(z.var() - 1) < Z * np.sqrt(2 / N)
    for threshold in (3.0, 4.0):
        assert stats.binomtest(int((z > threshold).sum()), N, stats.norm.sf(threshold)).pvalue > FALSE_ALARM


def test_integer_noise_is_independent_between_draws():
    stream = secure_stream()
    first, second = (discrete_gaussian(stream, N, 50.0) / 50 for _ in range(2))
    assert abs(np.mean(first * second)) < Z / np.sqrt(N)
    assert abs(np.mean(first[1:] * first[:-1])) < Z / np.sqrt(N)


def renyi(p: np.ndarray, q: np.ndarray, order: int) -> float:
    keep = (p > 0) & (q > 0)
    return float(special.logsumexp(order * np.log(p[keep]) + (1 - order) * np.log(q[keep])) / (order - 1))


@pytest.mark.parametrize("sigma", [1.0, 3.0])
@pytest.mark.parametrize("shift", [1, 2])
def test_claims_bound_the_true_divergence_of_neighbours(sigma, shift):
    """The laws themselves, summed up, against what event and rdp say."""
    k = np.arange(-30, 31)
    discrete = DiscreteGaussian(sigma, sensitivity=shift)
    noise = Skellam(sigma, l2_sensitivity=shift, l1_sensitivity=shift)
    for order in (2, 3, 8):
        pmf = gaussian_pmf(sigma)
        assert renyi(pmf(k), pmf(k - shift), order) <= discrete.event.rho * order * (1 + 1e-9)
        first, second = (special.ive(np.abs(k - s), sigma**2) for s in (0, shift))
        assert renyi(first, second, order) <= noise.rdp([order])[0] * (1 + 1e-9)


def test_skellam_is_refused_by_accountants_and_at_broken_orders():
    mechanism = Skellam(10.0, 1.0, 1.0)
    assert not RdpAccountant().supports(mechanism.event)
    for orders in ([1], [2.5]):
        with pytest.raises(ValueError, match="whole orders"):
            mechanism.rdp(orders)


@pytest.mark.parametrize(
    ("mechanism", "event"),
    [
        (Gaussian(3.0, sensitivity=2.0), GaussianDpEvent(1.5)),
        (DiscreteGaussian(4.0, sensitivity=2.0), ZCDpEvent(0.125)),
        (Exponential(2.0), ZCDpEvent(0.5)),
        (MetricRelease({"loss": 5.0}, 2.0), GaussianDpEvent(2.0)),
    ],
)
def test_events_say_what_was_done(mechanism, event: DpEvent):
    assert mechanism.event == event


def test_laplace_accounts_for_the_rounding_of_its_value():
    mechanism = Laplace(2.0, sensitivity=1.0, coordinates=100)
    assert isinstance(mechanism.event, LaplaceDpEvent)
    assert 2.0 * (1 - 1e-6) < mechanism.event.noise_multiplier < 2.0
    assert mechanism.epsilon == 0.5 + 100 * mechanism.grid / 2.0


@given(st.floats(-1e6, 1e6), st.floats(0.01, 100), st.integers(0, 1000))
@settings(deadline=None)
def test_laplace_releases_grid_points(value, scale, label):
    mechanism = Laplace(scale)
    released = float(mechanism.release(value, insecure_stream("laplace", label)))
    assert (released / mechanism.grid).is_integer()
    assert abs(released - value) < 60 * scale  # else one in 10^26


def test_laplace_clips_what_is_beyond_all_integers():
    released = Laplace(1.0, coordinates=2).release(np.array([1e300, -1e300]), secure_stream())
    np.testing.assert_allclose(released, [2.0**31, -(2.0**31)], rtol=1e-6)


def test_laplace_follows_its_law():
    released = Laplace(3.0, coordinates=N).release(np.full(N, 5.0), secure_stream())
    assert stats.kstest(released, stats.laplace(5.0, 3.0).cdf).pvalue > FALSE_ALARM


def bounds(count: int, total: int) -> tuple[float, float]:
    """Clopper-Pearson at 1e-8."""
    interval = stats.binomtest(count, total).proportion_ci(1 - 2e-8)
    return interval.low, interval.high


def test_laplace_loses_no_more_than_epsilon_on_neighbours_and_hardly_less():
    mechanism = Laplace(1.0, coordinates=N)
    here, there = (mechanism.release(np.full(N, value), secure_stream()) for value in (0.0, 1.0))
    for threshold in np.linspace(-4, 4, 17):
        low, _ = bounds(int((here <= threshold).sum()), N)
        _, high = bounds(int((there <= threshold).sum()), N)
        assert low <= np.e * high
    ratio = (here <= 0).mean() / (there <= 0).mean()
    assert ratio == pytest.approx(np.e, rel=0.05)  # more than ten standard errors


def test_exponential_follows_its_law_and_loses_no_more_than_epsilon_on_neighbours():
    mechanism, stream, draws = Exponential(1.5), secure_stream(), 20_000
    scores = np.array([[3.0, 2.0, 0.0, 2.5, -4.0], [2.0, 3.0, 1.0, 1.5, -3.0]])  # neighbours: none moves by more than 1
    counts = [np.bincount([mechanism.release(row, stream) for _ in range(draws)], minlength=5) for row in scores]
    for row, found in zip(scores, counts, strict=True):
        assert stats.chisquare(found, special.softmax(0.75 * row) * draws).pvalue > FALSE_ALARM
    for first, second in zip(counts[0], counts[1], strict=True):
        assert bounds(int(first), draws)[0] <= np.exp(1.5) * bounds(int(second), draws)[1]
        assert bounds(int(second), draws)[0] <= np.exp(1.5) * bounds(int(first), draws)[1]


def test_exponential_finds_one_among_many():
    scores = np.zeros(50_000)
    scores[31_337] = 1000.0
    assert Exponential(1.0).release(scores, secure_stream()) == 31_337
    assert Exponential(1.0).release([7.0], secure_stream()) == 0


def test_integer_mechanisms_keep_shape_and_add_integers():
    value = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    for mechanism in (DiscreteGaussian(2.0), Skellam(2.0, 1.0, 1.0)):
        released = mechanism.release(value, secure_stream())
        assert released.shape == (3, 4) and released.dtype == np.int64
        assert np.abs(released - value).max() < 60


def test_gaussian_keeps_shape_and_dtype():
    for value in (np.zeros((2, 3), np.float32), np.zeros((2, 3)), np.float64(1.0), 3):
        released = Gaussian(0.5).release(value, secure_stream())
        assert released.shape == np.shape(value)
        assert released.dtype == (np.float32 if getattr(value, "dtype", None) == np.float32 else np.float64)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Gaussian(0.0), "std"),
        (lambda: Gaussian(1.0, sensitivity=float("nan")), "sensitivity"),
        (lambda: Laplace(float("inf")), "scale"),
        (lambda: Exponential(-1.0), "epsilon"),
        (lambda: DiscreteGaussian(0.0), "sigma"),
        (lambda: Skellam(1.0, 1.0, 0.0), "l1_sensitivity"),
        (lambda: MetricRelease({}, 1.0), "noisy_count"),
        (lambda: MetricRelease({"loss": 0.0}, 1.0), "loss"),
        (lambda: DiscreteGaussian(1.0).release(np.zeros(3), secure_stream()), "integers"),
        (lambda: DiscreteGaussian(1.0).release(np.array([2**62]), secure_stream()), "2\\^62"),
        (lambda: Laplace(1.0).release(np.zeros(2), secure_stream()), "1 finite"),
        (lambda: Laplace(1.0).release(float("nan"), secure_stream()), "finite"),
        (lambda: Exponential(1.0).release([1.0, float("nan")], secure_stream()), "finite"),
        (lambda: Exponential(1.0).release([], secure_stream()), "one at least"),
        (lambda: clip_l2(np.arange(3), 1.0), "floating-point"),
        (lambda: clip_l2(np.ones(3), 0.0), "norm"),
        (lambda: noisy_mean(np.ones(3), 1.0, 1.0, 1.0, secure_stream()), "below upper"),
    ],
)
def test_bad_input_is_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


nasty = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 1.0, 1e-3, 5e-324, 1e-310]


def vectors(dtype: type[np.floating]) -> st.SearchStrategy[np.ndarray]:
    width = np.finfo(dtype).bits
    numbers = st.floats(width=width) | st.sampled_from(nasty).map(lambda x: float(dtype(x)))
    return arrays.arrays(dtype, st.integers(0, 20), elements=numbers)


@given(vectors(np.float32) | vectors(np.float64), st.floats(5e-324, 1e308))
@example(np.full(3, 1e308), 1e-320)
@example(np.full(7, 5e-324), 5e-324)
@example(np.full(20, 1e-45, np.float32), 3e-45)
@settings(deadline=None, max_examples=500)
def test_no_vector_escapes_clipping(values, norm):
    clipped = clip_l2(values, norm)
    assert clipped.dtype == values.dtype and clipped.shape == values.shape
    assert sum(Fraction(float(x)) ** 2 for x in clipped) <= Fraction(norm) ** 2
    if not np.isfinite(values).all():
        assert not clipped.any()
    elif sum(Fraction(float(x)) ** 2 for x in values) <= Fraction(norm) ** 2 * Fraction(999, 1000):
        assert clipped.tobytes() == values.tobytes()


@given(st.integers(1, 5000), st.floats(1e-3, 1e3), st.integers(0, 100))
@settings(deadline=None)
def test_clipping_keeps_the_direction_and_nearly_all_of_the_norm(size, norm, seed):
    values = np.random.default_rng(seed).normal(size=(size, 3)).astype(np.float32)
    length = np.linalg.norm(values.astype(np.float64))
    clipped = clip_l2(values, norm).astype(np.float64)
    assert np.linalg.norm(clipped) == pytest.approx(min(length, norm), rel=1e-5)
    np.testing.assert_allclose(clipped * (length / np.linalg.norm(clipped)), values, rtol=1e-5)


METRICS = MetricRelease({"loss": 10.0, "accuracy": 1.0}, noise_multiplier=4.0)


def test_metrics_are_right_when_there_is_enough_to_hide_in():
    n = 1_000_000
    values = {"loss": np.full(n, 2.5), "accuracy": np.arange(n) % 4 == 0}
    means, count = METRICS.release(values, secure_stream())
    assert means["loss"] == pytest.approx(2.5, abs=1e-3)
    assert means["accuracy"] == pytest.approx(0.25, abs=1e-4)
    assert count == pytest.approx(n, abs=100)


def test_metrics_carry_the_noise_that_is_claimed():
    """One noisy sum per metric and one count, each with 4·√3: seen in the count and in the mean's numerator."""
    n, stream = 5000, secure_stream()
    values = {"loss": np.full(n, 5.0), "accuracy": np.full(n, 0.5)}
    releases = [METRICS.release(values, stream) for _ in range(2000)]
    counts = np.array([count for _, count in releases])
    sums = np.array([means["loss"] / 10 * count for means, count in releases])
    for noise in (counts - n, sums - n / 2):
        assert stats.kstest(noise / (4 * np.sqrt(3)), "norm").pvalue > FALSE_ALARM
    assert abs(np.corrcoef(counts, sums)[0, 1]) < Z / np.sqrt(2000)


@pytest.mark.parametrize(("bad", "same_as"), [(np.nan, 0.0), (-np.inf, 0.0), (-3.0, 0.0), (np.inf, 10.0), (99.0, 10.0)])
def test_one_example_can_add_no_more_than_its_bound(bad, same_as):
    def release(value: float) -> tuple[dict[str, float], float]:
        values = {"loss": np.array([1.0, value, 2.0] * 50), "accuracy": np.ones(150)}
        return METRICS.release(values, insecure_stream("metrics"))

    assert release(bad) == release(same_as)


def test_a_site_without_examples_still_releases_noise():
    counts = set()
    for _ in range(200):
        means, count = METRICS.release({"loss": np.empty(0), "accuracy": np.empty(0)}, secure_stream())
        assert 0 <= means["loss"] <= 10 and 0 <= means["accuracy"] <= 1 and count >= 0
        counts.add(count)
    assert len(counts) > 50


def test_metrics_must_be_those_that_were_declared():
    with pytest.raises(ValueError, match="accuracy, loss"):
        METRICS.release({"loss": np.ones(3)}, secure_stream())
    with pytest.raises(ValueError, match="one value per example"):
        METRICS.release({"loss": np.ones(3), "accuracy": np.ones(2)}, secure_stream())


def test_noisy_counts_and_means():
    stream = secure_stream()
    assert noisy_count(10_000, 2.0, stream) == pytest.approx(10_000, abs=2 * Z)
    assert noisy_count(0, 1.0, stream) >= 0
    values = np.linspace(-5, 5, 100_001)
    assert noisy_mean(values, -1.0, 3.0, 1.0, stream) == pytest.approx(np.clip(values, -1, 3).mean(), abs=1e-3)
    assert noisy_mean(np.empty(0), -1.0, 3.0, 1.0, stream) >= -1.0
