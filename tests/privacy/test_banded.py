"""Banded noise: the right covariance, a sensitivity that no participation exceeds, less error than plain noise."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.banded import BandedNoise, banded_event, sensitivity, toeplitz_coefficients


def strategy_matrix(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    return sum(c * np.eye(rounds, k=-j) for j, c in enumerate(coefficients))


def streamed_inverse(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    """C⁻¹ as the streaming code applies it: to the unit matrix, row by row."""
    noise = BandedNoise(coefficients)
    return np.stack([noise.correlate(row) for row in np.eye(rounds)])


def patterns(rounds: int, min_separation: int) -> list[tuple[int, ...]]:
    """Every set of rounds in which a client may take part."""
    sets = (set_ for size in range(rounds + 1) for set_ in itertools.combinations(range(rounds), size))
    return [p for p in sets if all(b - a >= min_separation for a, b in itertools.pairwise(p))]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_sensitivity_is_the_worst_over_all_patterns_and_directions(rounds, bands, extra):
    c, gap = toeplitz_coefficients(rounds, bands), bands + extra
    matrix = strategy_matrix(c, rounds)
    # Orthogonal columns: the norm is the same for all directions of the updates, so one direction decides.
    worst = max(np.linalg.norm(matrix[:, list(p)].sum(1)) if p else 0.0 for p in patterns(rounds, gap))
    found = sensitivity(c, rounds, gap)
    assert worst <= found <= worst * (1 + 1e-9)


def test_sensitivity_of_fewer_participations_and_of_overlapping_columns():
    c = toeplitz_coefficients(100, 10)
    assert sensitivity(c, 100, 10, participations=3) == pytest.approx(math.sqrt(3))
    assert sensitivity(c, 100, 10) == pytest.approx(math.sqrt(10))
    assert sensitivity(c, 91, 10) == pytest.approx(math.sqrt(9 + c[0] ** 2))
    with pytest.raises(ValueError, match="min_separation"):
        sensitivity(c, 100, 9)


def test_coefficients_are_the_truncated_square_root_of_the_prefix_sum():
    root = toeplitz_coefficients(40, 40)
    prefix = np.convolve(root / root[0], root / root[0])[:40]
    np.testing.assert_allclose(prefix, 1.0, rtol=1e-12)
    short = toeplitz_coefficients(40, 7)
    np.testing.assert_allclose(short / short[0], (root / root[0])[:7], rtol=1e-12)
    assert np.linalg.norm(short) == pytest.approx(1.0) and (np.diff(short) < 0).all()
    assert len(toeplitz_coefficients(3, 7)) == 3
    with pytest.raises(ValueError, match="≥ 1"):
        toeplitz_coefficients(10, 0)


@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (8, 1), (8, 3), (20, 20), (50, 6)])
def test_streaming_applies_the_exact_inverse(rounds, bands):
    c = toeplitz_coefficients(rounds, bands)
    expected = np.linalg.inv(strategy_matrix(c, rounds))
    np.testing.assert_allclose(streamed_inverse(c, rounds), expected, atol=1e-12)


def test_covariance_is_that_of_the_factorisation():
    """Sampled: each entry has a standard error of at most 2/√n of the variances; 8 of them fail by chance < 1e-13."""
    rounds, n = 5, 200_000
    c = toeplitz_coefficients(rounds, 3)
    rng, noise = np.random.default_rng(0), BandedNoise(c)
    rows = np.stack([noise.correlate(rng.standard_normal(n)) for _ in range(rounds)])
    inverse = np.linalg.inv(strategy_matrix(c, rounds))
    expected = inverse @ inverse.T
    limit = 8 * 2 / math.sqrt(n) * expected.max()
    np.testing.assert_allclose(rows @ rows.T / n, expected, atol=limit)


def test_one_band_is_independent_noise():
    normals = np.random.default_rng(1).standard_normal((4, 10))
    noise = BandedNoise(toeplitz_coefficients(4, 1))
    for row in normals:
        assert noise.correlate(row).tobytes() == row.tobytes()
    assert noise.state_arrays() == {}
    assert banded_event(9, 1, 2.0) == GaussianDpEvent(banded_event(9, 1, 2.0).noise_multiplier)
    assert banded_event(9, 1, 2.0).noise_multiplier == pytest.approx(2.0 / 3)


@pytest.mark.parametrize(("rounds", "gap"), [(64, 8), (200, 20), (100, 100)])
def test_at_the_same_epsilon_running_sums_have_less_noise_than_with_independent_noise(rounds, gap):
    """Same participation limits, same Gaussian event: only the correlation differs."""
    prefix = np.tri(rounds)

    def error(bands: int) -> float:
        c = toeplitz_coefficients(rounds, bands)
        sigma = sensitivity(c, rounds, gap)
        return float(np.sqrt(np.mean(np.square(prefix @ np.linalg.inv(strategy_matrix(c, rounds))).sum(1)))) * sigma

    assert error(gap) < 0.75 * error(1)


def lost_rows_matrix(c: np.ndarray, rounds: int, checkpoint: int, lost: int) -> tuple[np.ndarray, list[int]]:
    """C of a run that crashed `lost` rounds after its checkpoint and went on from there; and the round of each row."""
    paths = [list(range(t + 1)) for t in range(checkpoint + lost)]
    for t in range(checkpoint, rounds):
        second = [checkpoint + lost + s - checkpoint for s in range(checkpoint, t + 1)]
        paths.append([*range(checkpoint), *second])
    matrix = np.zeros((len(paths), len(paths)))
    for row, path in enumerate(paths):
        for age, column in enumerate(reversed(path[-len(c) :])):
            matrix[row, column] = c[age]
    return matrix, [*range(checkpoint + lost), *range(checkpoint, rounds)]


@pytest.mark.parametrize(("checkpoint", "lost"), [(2, 1), (3, 2), (0, 3), (4, 4)])
def test_spare_rounds_cover_rounds_repeated_after_a_crash(checkpoint, lost):
    rounds, gap, z = 9, 3, 1.7
    c = toeplitz_coefficients(rounds, gap)
    matrix, round_of = lost_rows_matrix(c, rounds, checkpoint, lost)
    worst = 0.0
    for pattern in patterns(rounds, gap):  # whoever takes part in a round takes part in it again
        columns = [i for i, number in enumerate(round_of) if number in pattern]
        worst = max(worst, float(np.abs(matrix)[:, columns].sum(1) @ np.abs(matrix)[:, columns].sum(1)))
    claimed = z / banded_event(rounds, gap, z, spare_rounds=lost).noise_multiplier
    assert math.sqrt(worst) <= claimed
    assert math.sqrt(worst) > sensitivity(c, rounds, gap)


@given(st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_stopped_and_resumed_equals_never_stopped(bands, stop):
    c = toeplitz_coefficients(10, bands)
    normals = np.random.default_rng(bands).standard_normal((10, 4))
    whole = BandedNoise(c)
    expected = [whole.correlate(z) for z in normals]
    first = BandedNoise(c)
    rows = [first.correlate(z) for z in normals[:stop]]
    second = BandedNoise(c)
    assert len(first.state_arrays()) == first.rows_after(stop)
    second.load_state_arrays(first.state_arrays())
    rows += [second.correlate(z) for z in normals[stop:]]
    assert np.array(rows).tobytes() == np.array(expected).tobytes()


def test_a_caller_can_not_change_the_noise_that_is_kept():
    noise, other = BandedNoise(toeplitz_coefficients(5, 3)), BandedNoise(toeplitz_coefficients(5, 3))
    noise.correlate(np.ones(2))[:] = 99.0
    other.correlate(np.ones(2))
    assert noise.correlate(np.zeros(2)).tolist() == other.correlate(np.zeros(2)).tolist()


def test_state_of_another_factorisation_is_refused():
    noise = BandedNoise(toeplitz_coefficients(9, 2))
    for state in ({"000001": np.zeros(1), "000002": np.zeros(1)}, {"x": np.zeros(1)}):
        with pytest.raises(ValueError, match="2 bands"):
            noise.load_state_arrays(state)
