"""The noisy mean: bounded influence of any client, exact sums in any order, the claimed noise whatever arrives."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.client_level import clip_update
from fedplat import wire
from fedplat.privacy_section import AdaptiveClip
from privacy.banded import BandedNoise, toeplitz_coefficients
from privacy.clip_norm import RANGE
from privacy.gaussian import grid_of
from privacy.randomness import insecure_stream, secure_stream
from server_app.private_mean import GRID_BITS, MAX_UPDATES, Mechanism, PrivateMean

Arrays = dict[str, np.ndarray]
MODEL: Arrays = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "b": np.zeros((), np.float64),
    "steps": np.array(7, np.int64),
    "mask": np.array([True, False]),
}
FLOATS = ("w", "b")

values = st.one_of(st.floats(-3, 3, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
norms = st.floats(1e-6, 1e6)


def moved(rng: np.random.Generator, scale: float) -> Arrays:
    shift = {name: MODEL[name] + scale * rng.standard_normal(MODEL[name].shape) for name in FLOATS}
    return MODEL | {name: np.asarray(array).astype(MODEL[name].dtype) for name, array in shift.items()}


def without_noise(clip_norm: float = 1.0, normaliser: float = 1.0, model: Arrays = MODEL) -> PrivateMean:
    return PrivateMean(model, Mechanism(clip_norm, 0.0, normaliser), secure_stream())


def flat(arrays: Arrays, names: tuple[str, ...] = FLOATS) -> np.ndarray:
    return np.concatenate([np.asarray(arrays[name], np.float64).reshape(-1) for name in names])


def clipped(update: Arrays, clip_norm: float) -> np.ndarray:
    delta = flat(update) - flat(MODEL)
    return delta * min(1.0, clip_norm / max(np.linalg.norm(delta), 1e-300))


# --- the mean ---------------------------------------------------------------------------------------


def test_without_noise_it_is_the_clipped_mean_over_the_fixed_denominator():
    rng = np.random.default_rng(0)
    updates = [moved(rng, scale) for scale in (0.01, 0.1, 1.0, 10.0)]
    reducer = without_noise(clip_norm=0.5, normaliser=10.0)
    for update in updates:
        reducer.add(update, 1)
    expected = flat(MODEL) + sum(clipped(update, 0.5) for update in updates) / 10.0
    np.testing.assert_allclose(flat(reducer.mean()), expected, rtol=2e-7, atol=4 * 0.5 * 2.0**-GRID_BITS)
    assert reducer.count == 4


@given(st.integers(1, 12), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_any_order_and_stacks_give_the_same_bits(count, shuffler):
    rng = np.random.default_rng(count)
    updates = [moved(rng, 10.0 ** rng.integers(-3, 3)) for _ in range(count)]
    shuffled = list(updates)
    shuffler.shuffle(shuffled)

    def released(feed) -> bytes:
        reducer = PrivateMean(MODEL, Mechanism(0.7, 1.3, 5.0), insecure_stream("test", count))
        feed(reducer)
        return b"".join(array.tobytes() for array in reducer.mean().values())

    one_by_one = released(lambda reducer: [reducer.add(update, 1) for update in updates])
    assert released(lambda reducer: [reducer.add(update, 1) for update in shuffled]) == one_by_one
    stacks = {name: np.stack([update[name] for update in updates]) for name in MODEL}
    assert released(lambda reducer: reducer.add_stack(stacks, [1] * count)) == one_by_one


@given(st.lists(values, min_size=1, max_size=40), norms)
@settings(deadline=None, max_examples=200)
def test_one_client_moves_the_sum_by_at_most_the_clip_norm(coordinates, clip_norm):
    model = {"x": np.zeros(len(coordinates), np.float32)}
    reducer = without_noise(clip_norm, model=model)
    reducer.add({"x": np.array(coordinates, np.float32)}, 1)
    steps = [int(step) for step in reducer._sum]
    # Exact, in rational numbers: no float can round this to the wrong side.
    assert sum(step * step for step in steps) * Fraction(reducer._grid) ** 2 <= Fraction(clip_norm) ** 2
    assert 2.0**GRID_BITS <= clip_norm / reducer._grid < 2.0 ** (GRID_BITS + 1)
    for step, coordinate in zip(steps, coordinates, strict=True):
        assert step == 0 or math.copysign(1, step) == math.copysign(1, coordinate)
        assert abs(step) * reducer._grid <= abs(coordinate)


def test_integer_and_boolean_arrays_keep_the_models_values():
    reducer = without_noise()
    reducer.add(MODEL | {"steps": np.array(10**12), "mask": np.array([False, True])}, 1)
    released = reducer.mean()
    assert released["steps"] == 7 and released["mask"].tolist() == [True, False]
    assert {name: (a.shape, a.dtype) for name, a in released.items()} == {
        name: (a.shape, a.dtype) for name, a in MODEL.items()
    }


ATTACKS = {
    "a thousand clip norms": moved(np.random.default_rng(1), 1000.0),
    "zero update": MODEL,
    "everything in one coordinate": MODEL | {"b": np.array(1e12)},
}


@pytest.mark.parametrize("update", ATTACKS.values(), ids=ATTACKS.keys())
def test_whatever_is_accepted_is_within_the_clip_norm(update):
    reducer = without_noise(clip_norm=0.25)
    reducer.add(update, 1)
    assert np.linalg.norm(reducer._sum * reducer._grid) <= 0.25


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        ({"w": np.full((3, 4), np.nan, np.float32)}, 1, "NaN or infinite"),
        ({"b": np.array(np.inf)}, 1, "NaN or infinite"),
        ({"b": np.array(1e200)}, 1, "NaN or infinite"),
        ({"w": np.zeros((4, 3), np.float32)}, 1, "shape"),
        ({"more": np.zeros(1)}, 1, "names"),
        ({}, 10**6, "weigh 1"),
        ({}, 0, "weigh 1"),
    ],
)
def test_what_is_refused_leaves_the_sum_as_it_was(change, weight, message):
    reducer = without_noise()
    reducer.add(moved(np.random.default_rng(2), 0.1), 1)
    before = reducer._sum.copy()
    with pytest.raises(ValueError, match=message):
        reducer.add(MODEL | change, weight)
    assert reducer.count == 1 and (reducer._sum == before).all()


def test_sums_can_not_outgrow_what_float64_holds(monkeypatch):
    assert MAX_UPDATES * 2 ** (GRID_BITS + 1) < 2**53
    monkeypatch.setattr("server_app.private_mean.MAX_UPDATES", 1)
    reducer = without_noise()
    reducer.add(MODEL, 1)
    with pytest.raises(ValueError, match="more than 1"):
        reducer.add(MODEL, 1)


# --- the noise --------------------------------------------------------------------------------------


def wide(size: int) -> Arrays:
    return {"x": np.zeros(size, np.float64)}


@pytest.mark.parametrize("replies", [0, 1, 7])
def test_noise_does_not_depend_on_the_number_of_replies(replies):
    """Sample variance of n normals: standard error √(2/n) of it. 6 of them: a false alarm in 5e8 runs."""
    n, z, clip_norm, normaliser = 200_000, 0.8, 2.5, 20.0
    reducer = PrivateMean(wide(n), Mechanism(clip_norm, z, normaliser), secure_stream())
    for _ in range(replies):
        reducer.add(wide(n), 1)
    noise = reducer.mean()["x"]
    expected = (z * clip_norm / normaliser) ** 2
    assert noise.var() == pytest.approx(expected, rel=6 * math.sqrt(2 / n))
    assert abs(noise.mean()) < 6 * math.sqrt(expected / n)
    on_grid = noise * normaliser / grid_of(z * clip_norm)
    np.testing.assert_allclose(on_grid, np.rint(on_grid), atol=1e-6)


def test_two_releases_are_independent_but_asking_twice_is_one_release():
    """Correlation of n pairs: standard error 1/√n; 6 of them: a false alarm in 5e8 runs."""
    n = 100_000
    first, second = (PrivateMean(wide(n), Mechanism(1.0, 1.0, 1.0), secure_stream()) for _ in range(2))
    one, other = first.mean()["x"], second.mean()["x"]
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(n)
    assert first.mean()["x"] is one
    with pytest.raises(ValueError, match="released already"):
        first.add(wide(n), 1)


def test_banded_noise_is_added_on_the_grid_with_the_rows_of_the_factorisation():
    """Row t has variance ‖(C⁻¹)_t‖² · (z·C)²; 6 standard errors as above, and the grid moves it by 2⁻²⁴."""
    n, z, clip_norm, coefficients = 100_000, 1.5, 0.3, toeplitz_coefficients(4, 3)
    banded = BandedNoise(coefficients)
    inverse = np.linalg.inv(sum(c * np.eye(4, k=-j) for j, c in enumerate(coefficients)))
    model = {"x": np.full(n, 3.0)}
    rows = []
    for t in range(4):
        released = PrivateMean(model, Mechanism(clip_norm, z, 1.0), secure_stream(), banded).mean()["x"] - 3.0
        on_grid = released / grid_of(z * clip_norm)
        assert (on_grid == np.rint(on_grid)).all()
        assert released.var() == pytest.approx(
            (z * clip_norm) ** 2 * np.square(inverse[t]).sum(), rel=6 * math.sqrt(2 / n)
        )
        rows.append(released / (z * clip_norm))
    assert np.mean(rows[0] * rows[1]) == pytest.approx(inverse[0] @ inverse[1], abs=0.05)
    assert inverse[0] @ inverse[1] < -0.3


# --- the adaptive clip norm -------------------------------------------------------------------------


def adaptive(clip_norm: float, bits: list[float], normaliser: float, count_noise: float = 0.0, **settings) -> float:
    model = MODEL | {wire.CLIP_NORM: np.array(clip_norm, np.float32)}
    mechanism = Mechanism(clip_norm, 0.0, normaliser, AdaptiveClip(**settings), count_noise)
    reducer = PrivateMean(model, mechanism, secure_stream())
    for bit in bits:
        reducer.add(MODEL | {wire.CLIP_NORM: np.array(bit, np.float32)}, 1)
    released = reducer.mean()[wire.CLIP_NORM]
    assert released.dtype == np.float32 and released.shape == ()
    return float(released)


def test_clip_norm_takes_the_geometric_step_of_the_noisy_share():
    assert adaptive(2.0, [1, 1, 1, 0], 4.0, quantile=0.5, lr=0.2) == pytest.approx(2 * math.exp(-0.2 * 0.25))
    # Two of the eight that the denominator expects: the six that are missing count as half below.
    assert adaptive(2.0, [0, 0], 8.0, quantile=0.5, lr=0.2) == pytest.approx(2 * math.exp(0.2 / 8))
    assert adaptive(2.0, [], 8.0, quantile=0.5) == pytest.approx(2.0)
    assert adaptive(RANGE[1], [0] * 5, 5.0) == RANGE[1]  # the largest there is


def test_the_count_is_noisy():
    """Count noise 3 over 10: a step's logarithm has standard deviation lr · 0.3; 6 standard errors, as above."""
    logs = [math.log(adaptive(1.0, [1, 0], 10.0, count_noise=3.0, lr=0.1)) for _ in range(2000)]
    assert np.var(logs) == pytest.approx((0.1 * 0.3) ** 2, rel=6 * math.sqrt(2 / 2000))


@pytest.mark.parametrize("claim", [0.5, 2.0, -1.0, 1e6])
def test_a_client_has_one_vote_about_the_clip_norm(claim):
    with pytest.raises(ValueError, match="must be 1"):
        adaptive(1.0, [claim], 2.0)


def test_clip_norm_finds_the_quantile_of_norms():
    """Its logarithm then wanders with a standard deviation of 0.03; 7 of them: a false alarm in 4e11 runs."""
    rng, clip_norm = np.random.default_rng(3), 0.05
    for _ in range(120):
        lengths = rng.lognormal(0.0, 0.5, 50)
        bits = [float(length <= clip_norm) for length in lengths]
        clip_norm = adaptive(clip_norm, bits, 50.0, count_noise=2.5, quantile=0.7, lr=0.2)
    assert clip_norm == pytest.approx(math.exp(0.5 * 0.5244), rel=0.25)  # the 0.7 quantile of the lognormal


# --- the client's half ------------------------------------------------------------------------------


@given(st.lists(st.tuples(values, values), min_size=1, max_size=30), norms)
@settings(deadline=None, max_examples=200)
def test_what_a_client_sends_is_within_the_clip_norm(pairs, clip_norm):
    x = {"x": np.array([a for a, _ in pairs], np.float32)}
    y = {"x": np.array([b for _, b in pairs], np.float32)}
    sent, below = clip_update(x, y, clip_norm)
    delta, true = (flat(a, ("x",)) - flat(x, ("x",)) for a in (sent, y))
    assert np.linalg.norm(delta) <= clip_norm * (1 + 1e-12)
    assert sent["x"].dtype == np.float32
    assert below == (np.linalg.norm(true) <= clip_norm) or np.linalg.norm(true) == pytest.approx(clip_norm)
    if below:
        assert sent["x"].tobytes() == y["x"].tobytes()


def test_clipping_scales_all_arrays_together_and_leaves_buffers():
    trained = moved(np.random.default_rng(4), 5.0) | {"steps": np.array(99), "mask": np.array([False, False])}
    sent, below = clip_update(MODEL, trained, 0.5)
    assert not below and list(sent) == list(MODEL)
    assert sent["steps"] == 7 and sent["mask"].tolist() == [True, False]
    np.testing.assert_allclose(flat(sent) - flat(MODEL), clipped(trained, 0.5), atol=2e-7)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_diverged_client_sends_what_it_received(poison):
    trained = moved(np.random.default_rng(5), 0.01)
    trained["w"] = trained["w"].copy()
    trained["w"][1, 1] = poison
    sent, below = clip_update(MODEL, trained, 1.0)
    assert not below
    assert all(sent[name].tobytes() == MODEL[name].tobytes() for name in MODEL)


def test_no_change_is_no_problem():
    sent, below = clip_update(MODEL, MODEL, 1.0)
    assert below and all(sent[name].tobytes() == MODEL[name].tobytes() for name in MODEL)
