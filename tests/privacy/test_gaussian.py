"""Gaussian noise: the exact law, on a grid that does not depend on the value.

Statistical tests fail by chance with a probability of at most 1e-6 each.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privacy import gaussian
from privacy.gaussian import add_gaussian, grid_of, standard_normals
from privacy.randomness import insecure_stream, secure_stream

FALSE_ALARM = 1e-7
Z = 5.6
"""A normal is further out than this with probability 2e-8."""


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return standard_normals(secure_stream(), 2_000_000)


def test_normals_follow_the_normal_law(normals):
    n = normals.size
    assert stats.kstest(normals, "norm").pvalue > FALSE_ALARM
    assert abs(normals.mean()) < Z / np.sqrt(n)
    assert abs(normals.var() - 1) < Z * np.sqrt(2 / n)
    assert abs((normals**4).mean() - 3) < Z * np.sqrt(96 / n)


def test_fine_cells_have_their_probability(normals):
    """A thousand equally likely cells: the edges of the Ziggurat's layers lie in many of them."""
    cells = np.bincount((stats.norm.cdf(normals) * 1000).astype(int), minlength=1000)
    assert stats.chisquare(cells).pvalue > FALSE_ALARM


@pytest.mark.parametrize("threshold", [1.0, 2.0, 3.0, gaussian._R, 4.0, 4.5, 5.0])
def test_both_tails_have_their_weight(normals, threshold):
    for tail in (normals, -normals):
        count = int((tail > threshold).sum())
        assert stats.binomtest(count, normals.size, stats.norm.sf(threshold)).pvalue > FALSE_ALARM


def test_the_tail_beyond_the_base_strip_is_the_conditional_law():
    beyond = gaussian._tail(secure_stream(), 200_000)
    assert stats.kstest(stats.norm.sf(beyond) / stats.norm.sf(gaussian._R), "uniform").pvalue > FALSE_ALARM


def test_all_layers_have_the_same_area():
    """Up to rounding that changes the density by a relative error far below what the module claims."""
    width, height = gaussian._WIDTH[1:], gaussian._HEIGHT[1:]
    strip = gaussian._R * height[0] + np.sqrt(2 * np.pi) * stats.norm.sf(gaussian._R)
    error = np.abs(np.diff(height) - strip / width)
    assert (error < 2.0**-44 * height[:-1]).all()
    assert gaussian._WIDTH[0] * height[0] == pytest.approx(strip, rel=2.0**-48)
    assert height[-1] == 1


def test_steps_and_streams_are_independent():
    n = 300_000
    stream = secure_stream()
    draws = [standard_normals(stream, n), standard_normals(stream, n), standard_normals(secure_stream(), n)]
    for i, first in enumerate(draws):
        assert abs(np.mean(first[1:] * first[:-1])) < Z / np.sqrt(n)
        assert abs(np.mean((first[1:] ** 2 - 1) * (first[:-1] ** 2 - 1))) < Z * 2 / np.sqrt(n)
        for second in draws[i + 1 :]:
            assert abs(np.mean(first * second)) < Z / np.sqrt(n)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("std", [1e-6, 0.37, 1.0, 5000.0])
def test_added_noise_has_its_standard_deviation(dtype, std):
    values = (np.linspace(-3, 3, 300_000) * std).astype(dtype)
    noise = (add_gaussian(values, std, secure_stream()).astype(np.float64) - values) / std
    assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM
    assert abs(noise.var() - 1) < Z * np.sqrt(2 / noise.size)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50),
    st.floats(2.0**-40, 2.0**40),
    st.integers(0, 1000),
)
@settings(deadline=None)
def test_every_result_is_a_point_of_the_grid(values, std, label):
    grid = grid_of(std)
    noisy = add_gaussian(np.array(values, np.float32), std, insecure_stream("grid", label))
    finite = noisy[np.isfinite(noisy)].astype(np.float64)
    assert grid <= std * 2.0**-12 < 2 * grid
    np.testing.assert_array_equal(np.rint(finite / grid) * grid, finite)


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=50), st.floats(0.001, 1000), st.floats(-0.49, 0.49))
@settings(deadline=None)
def test_moving_a_value_by_grid_points_moves_the_result_and_nothing_else(points, std, below_the_grid):
    """So the noise can't tell where on the grid the value was: no holes, no pattern in the low bits."""
    grid, places = grid_of(std), np.array(points, np.float64)
    here = add_gaussian(np.full(len(points), below_the_grid * grid), std, insecure_stream("move"))
    there = add_gaussian((places + below_the_grid) * grid, std, insecure_stream("move"))
    np.testing.assert_array_equal(np.abs((there - here) / grid - places) <= 1, True)
    exact = (places + below_the_grid) - places == below_the_grid  # else the shift itself was rounded
    np.testing.assert_array_equal(((there - here) / grid)[exact], places[exact])


def test_neighbouring_cells_are_all_reached():
    """No holes: at a coarse scale every grid point around the value turns up."""
    noisy = add_gaussian(np.full(2_000_000, 0.3, np.float32), 1.0, secure_stream())
    points = np.rint(noisy.astype(np.float64) / grid_of(1.0)).astype(np.int64)
    central = points[np.abs(noisy - 0.3) < 0.25]
    assert np.unique(central).size == 2048  # each is hit about 190 times: missed with probability e^-180


def test_noise_can_be_added_in_place():
    values = np.linspace(-1, 1, 100_000, dtype=np.float32)
    expected = add_gaussian(values, 0.5, insecure_stream("place"))
    assert add_gaussian(values, 0.5, insecure_stream("place"), out=values) is values
    assert values.tobytes() == expected.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_is_refused_and_left_alone(bad, dtype):
    values = np.array([1.0, bad, 2.0], dtype)
    before = values.tobytes()
    with pytest.raises(ValueError, match="finite"):
        add_gaussian(values, 1.0, secure_stream(), out=values)
    assert values.tobytes() == before


@pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_noise_needs_a_standard_deviation(std):
    with pytest.raises(ValueError, match="standard deviation"):
        add_gaussian(np.zeros(3, np.float32), std, secure_stream())


@pytest.mark.parametrize("values", [np.zeros(3, np.int64), np.zeros((2, 2), np.float32), np.zeros(6, np.float32)[::2]])
def test_only_flat_contiguous_floats_are_taken(values):
    with pytest.raises(ValueError, match="flat, contiguous"):
        add_gaussian(values, 1.0, secure_stream())


def test_an_empty_array_stays_empty():
    assert add_gaussian(np.empty(0, np.float32), 1.0, secure_stream()).size == 0
    assert standard_normals(secure_stream(), 0).size == 0
