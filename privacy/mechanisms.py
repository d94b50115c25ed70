"""Mechanisms: each a frozen record of its noise and sensitivity, with what it releases and the event it costs.

Clipping bounds what one record can do, `release` hides it, `event` says what that cost in dp-accounting's terms.
The invariant: noise lives on a grid (see `gaussian.py`, `discrete.py`), so what is accounted for holds in floating
point; where a value is rounded to the grid before the noise, the event has the larger sensitivity. A sensitivity is the
most that adding or removing one record changes the value (L2 norm, unless said otherwise).

Values must be finite; whoever computes them has zeroed what is not. (`clip_l2` and `MetricRelease` do it themselves.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import frexp, inf, isfinite, ldexp, sqrt

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, UnsupportedDpEvent, ZCDpEvent

from privacy.discrete import discrete_gaussian, rounded_laplace, skellam
from privacy.gaussian import STD_RANGE, add_gaussian
from privacy.randomness import Keystream

LAPLACE_GRID_BITS = 30
METRIC_BITS = 20
"""Metrics are summed as whole multiples of 2⁻²⁰ of their bound: exactly, so that rounding adds nothing to a sum."""
_INTEGER_LIMIT = 2**62
_CHUNK = 1 << 16


def _check_positive(**numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 < number < inf:
            raise ValueError(f"{name} must be a finite number > 0 (got {number})")


@dataclass(frozen=True)
class Gaussian:
    """value + N(0, std²) on a grid."""

    std: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(std=self.std, sensitivity=self.sensitivity)

    def release(self, value: np.ndarray | float, stream: Keystream) -> np.ndarray:
        """The noisy value, in its own shape; float32 stays float32, all else becomes float64."""
        array = np.ascontiguousarray(value, np.float32 if getattr(value, "dtype", None) == np.float32 else np.float64)
        return add_gaussian(array.reshape(-1), self.std, stream).reshape(np.shape(value))

    @property
    def event(self) -> DpEvent:
        return GaussianDpEvent(self.std / self.sensitivity)


@dataclass(frozen=True)
class Laplace:
    """value + Laplace(scale), for a value of `coordinates` numbers with this L1 sensitivity.

    Both live on the grid γ, the largest power of two ≤ scale·2⁻³⁰: the value is rounded to it first, which adds
    at most γ per coordinate to the sensitivity, and the noise is a Laplace number rounded to it.
    """

    scale: float
    sensitivity: float = 1.0
    coordinates: int = 1

    def __post_init__(self) -> None:
        _check_positive(scale=self.scale, sensitivity=self.sensitivity, coordinates=self.coordinates)
        if not STD_RANGE[0] <= self.scale <= STD_RANGE[1]:
            raise ValueError(f"scale must lie in [2^-100, 2^100] (got {self.scale})")

    @property
    def grid(self) -> float:
        return ldexp(1.0, frexp(self.scale)[1] - 1 - LAPLACE_GRID_BITS)

    @property
    def epsilon(self) -> float:
        """Of one release, with δ = 0."""
        return (self.sensitivity + self.coordinates * self.grid) / self.scale

    def release(self, value: np.ndarray | float, stream: Keystream) -> np.ndarray:
        array = np.asarray(value, np.float64)
        if array.size != self.coordinates or not np.isfinite(array).all():
            raise ValueError(f"the value must be {self.coordinates} finite numbers")
        limit = 2.0**61 * self.grid  # clipping to ±2³¹ scales and more: what is beyond would not fit an integer
        points = np.rint(np.clip(array, -limit, limit) / self.grid).astype(np.int64).reshape(-1)
        noisy: np.ndarray = points + rounded_laplace(stream, points.size, self.scale / self.grid)
        released: np.ndarray = noisy.reshape(array.shape) * self.grid
        return released

    @property
    def event(self) -> DpEvent:
        return LaplaceDpEvent(1 / self.epsilon)


@dataclass(frozen=True)
class Exponential:
    """Chooses i with probability ∝ exp(ε·score_i / 2Δ), where one record changes no score by more than Δ.

    By rejection: a uniform candidate is kept with probability exp(−ε·(best − score)/2Δ), tested with an exponential
    number of full precision. No weights are summed or rounded, no candidate gets probability 0.
    Rounding of the exponent x changes a probability by a factor of 1 ± x·2⁻⁵⁰.
    """

    epsilon: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(epsilon=self.epsilon, sensitivity=self.sensitivity)

    def release(self, scores: np.ndarray | Sequence[float], stream: Keystream) -> int:
        """The index of the chosen candidate. Expected work: a small multiple of the number of candidates."""
        array = np.asarray(scores, np.float64).reshape(-1)
        if not array.size or not np.isfinite(array).all():
            raise ValueError("scores must be finite, and there must be one at least")
        exponents = (array.max() - array) * (self.epsilon / (2 * self.sensitivity))
        mask = np.uint64((1 << (array.size - 1).bit_length()) - 1)
        tries = min(2 * array.size + 16, _CHUNK)
        while True:
            candidates = (stream.words(tries) & mask).astype(np.int64)
            candidates = candidates[candidates < array.size]
            kept = np.flatnonzero(stream.exponentials(candidates.size) >= exponents[candidates])
            if kept.size:
                return int(candidates[kept[0]])

    @property
    def event(self) -> DpEvent:
        """ε²/8-zCDP, from the bounded range of this mechanism (Cesar & Rogers 2021); ε-DP alone gives ε²/2."""
        return ZCDpEvent(self.epsilon**2 / 8)


def _add_integers(value: np.ndarray, noise: np.ndarray) -> np.ndarray:
    result: np.ndarray = value.astype(np.int64) + noise.reshape(value.shape)
    return result


def _check_integers(value: np.ndarray) -> None:
    if not np.issubdtype(value.dtype, np.integer):
        raise ValueError("the value must consist of integers: scale and round it first, and count that as sensitivity")
    if value.size and max(int(value.max()), -int(value.min())) >= _INTEGER_LIMIT:
        raise ValueError("the value must lie inside ±2^62")


@dataclass(frozen=True)
class DiscreteGaussian:
    """Integers + noise with P(y) ∝ exp(−y²/2σ²) (Canonne, Kamath & Steinke 2020)."""

    sigma: float
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(sigma=self.sigma, sensitivity=self.sensitivity)

    def release(self, value: np.ndarray, stream: Keystream) -> np.ndarray:
        _check_integers(value)
        return _add_integers(value, discrete_gaussian(stream, value.size, self.sigma))

    @property
    def event(self) -> DpEvent:
        """Δ²/2σ²-zCDP, as they prove: no worse than the continuous Gaussian's."""
        return ZCDpEvent((self.sensitivity / self.sigma) ** 2 / 2)


@dataclass(frozen=True)
class Skellam:
    """Integers + the difference of two Poisson numbers, variance σ². Shares of it add up to the same law.

    Only a Rényi bound at whole orders is known (Agarwal, Kairouz & Liu 2021), and dp-accounting has no event for that:
    `event` is one that every accountant refuses. Whoever uses this mechanism accounts for it by `rdp`.
    """

    sigma: float
    l2_sensitivity: float
    l1_sensitivity: float

    def __post_init__(self) -> None:
        _check_positive(sigma=self.sigma, l2_sensitivity=self.l2_sensitivity, l1_sensitivity=self.l1_sensitivity)

    def release(self, value: np.ndarray, stream: Keystream) -> np.ndarray:
        _check_integers(value)
        return _add_integers(value, skellam(stream, value.size, self.sigma))

    def rdp(self, orders: Sequence[int]) -> np.ndarray:
        """An upper bound of the Rényi divergence at each order."""
        if any(order != int(order) or order < 2 for order in orders):
            raise ValueError("the bound of Skellam noise holds at whole orders ≥ 2 only")
        a, variance = np.asarray(orders, np.float64), self.sigma**2
        square = self.l2_sensitivity**2
        near = ((2 * a - 1) * square + 6 * self.l1_sensitivity) / (4 * variance**2)
        return a * square / (2 * variance) + np.minimum(near, 3 * self.l1_sensitivity / (2 * variance))

    @property
    def event(self) -> DpEvent:
        return UnsupportedDpEvent()


@dataclass(frozen=True)
class MetricRelease:
    """Means of per-example metrics and the number of examples, in one Gaussian release.

    An example adds (m₁/b₁, …, m_k/b_k, 1) to a sum, each metric clipped to [0, bound]: L2 sensitivity √(k+1), whether
    it is added, removed or replaced. The noise of a coordinate has a standard deviation of noise_multiplier·√(k+1).
    """

    bounds: Mapping[str, float]
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ValueError("there must be a metric at least; use noisy_count for a count alone")
        _check_positive(noise_multiplier=self.noise_multiplier)
        _check_positive(**self.bounds)

    def release(self, per_example: Mapping[str, np.ndarray], stream: Keystream) -> tuple[dict[str, float], float]:
        """Noisy means within [0, bound] and the noisy count, ≥ 0. Empty arrays are released like any other."""
        if per_example.keys() != self.bounds.keys():
            raise ValueError(f"metrics must be {', '.join(sorted(self.bounds))}")
        counts = {np.size(values) for values in per_example.values()}
        if len(counts) != 1:
            raise ValueError("all metrics must have one value per example")
        unit = 2**METRIC_BITS
        sums = [self._integer_sum(per_example[name], bound) for name, bound in self.bounds.items()]
        exact = np.array([*sums, counts.pop() * unit], np.float64) / unit
        noisy = add_gaussian(exact, self.noise_multiplier * sqrt(len(exact)), stream)
        count = max(float(noisy[-1]), 0.0)
        means = np.clip(noisy[:-1] / max(count, 1.0), 0.0, 1.0)
        return {
            name: float(mean) * bound for (name, bound), mean in zip(self.bounds.items(), means, strict=True)
        }, count

    @staticmethod
    def _integer_sum(values: np.ndarray, bound: float) -> int:
        finite = np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=bound, neginf=0.0)
        return int(np.rint(np.clip(finite, 0.0, bound) / bound * 2**METRIC_BITS).astype(np.int64).sum())

    @property
    def event(self) -> DpEvent:
        return GaussianDpEvent(self.noise_multiplier)


def noisy_count(count: int, noise_multiplier: float, stream: Keystream) -> float:
    """How many records there are, ≥ 0. Costs GaussianDpEvent(noise_multiplier)."""
    return max(float(Gaussian(noise_multiplier).release(float(count), stream)), 0.0)


def noisy_mean(values: np.ndarray, lower: float, upper: float, noise_multiplier: float, stream: Keystream) -> float:
    """The mean of values clipped to [lower, upper], NaN as lower. Costs GaussianDpEvent(noise_multiplier)."""
    if not (isfinite(lower) and isfinite(upper) and lower < upper):
        raise ValueError(f"lower must be below upper (got {lower}, {upper})")
    release = MetricRelease({"mean": upper - lower}, noise_multiplier)
    means, _ = release.release({"mean": np.asarray(values, np.float64) - lower}, stream)
    return lower + means["mean"]


def clip_l2(values: np.ndarray, norm: float) -> np.ndarray:
    """The array, scaled down to an L2 norm of at most `norm`: in exact arithmetic, for the returned floats, always.

    A value that isn't finite makes all of them zero: a record can't buy itself out of clipping. Zero stays zero.
    """
    if not np.issubdtype(values.dtype, np.floating):
        raise ValueError(f"only floating-point arrays can be clipped (got {values.dtype})")
    _check_positive(norm=norm)
    if not np.isfinite(values).all():
        return np.zeros_like(values)
    length, exponent = _upper_length(values)
    if _fits(length, exponent, norm):
        return values.copy()
    shrink = 1 - 4 * float(np.finfo(values.dtype).eps)
    scaled = np.ldexp(values.astype(np.float64), -exponent)
    clipped: np.ndarray = (scaled * (norm * shrink / length)).astype(values.dtype)
    while not _fits(*_upper_length(clipped), norm):  # only among subnormal numbers, where rounding is coarse
        clipped *= 0.5
    return clipped


def _upper_length(values: np.ndarray) -> tuple[float, int]:
    """(a, e) with ‖values‖ ≤ a·2ᵉ, above it by rounding errors only. The scale e keeps squares from overflowing."""
    flat = values.reshape(-1)
    peak = max(float(flat.max()), -float(flat.min())) if flat.size else 0.0
    exponent, total = frexp(peak)[1], 0.0
    for start in range(0, flat.size, _CHUNK):
        part = np.ldexp(flat[start : start + _CHUNK].astype(np.float64), -exponent)
        total += float(np.dot(part, part))
    return sqrt(total) * (1 + (flat.size + 8) * 2.0**-52), exponent


def _fits(length: float, exponent: int, norm: float) -> bool:
    try:
        return length <= ldexp(norm, -exponent)
    except OverflowError:  # the norm is beyond all floats at this scale
        return True
