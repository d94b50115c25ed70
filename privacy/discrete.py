"""Integer noise: discrete Gaussian, rounded Laplace and Skellam, by one rejection sampler.

The laws are log-concave with their peak at a known integer. A proposal is a bucket V (a geometric number) of 2ᵇ
integers, a uniform place in it, and a sign; it is accepted with probability exp(log p(y) + V − c), where c is the
largest value of log p(2ᵇV) + V. That is the sampler of Canonne, Kamath & Steinke (2020) with its two tests made one.

Places and signs are random bits, exact. A test is {E ≥ x} with an exponential E of full precision, so nothing is
truncated and no integer is out of reach; only x is rounded. Each probability is right to a relative error of
2⁻⁴⁰ out to ten standard deviations: over 2⁴⁰ draws, the law that is sampled and the law that is accounted for are
2⁻⁴¹-zCDP apart. Not constant in time.
"""

from collections.abc import Callable
from math import ceil, expm1, log, log2, sinh, sqrt

import numpy as np

from privacy.randomness import Keystream

MAX_SCALE = 2.0**40
MAX_SKELLAM_SIGMA = 2.0**24
_CHUNK = 1 << 15
_SLACK = 2.0**-40
"""Keeps the acceptance probability below one, whatever the rounding of c."""
_SMALL = 16
_LOG_FACTORIALS = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, _SMALL)))])

LogRatio = Callable[[np.ndarray], np.ndarray]


def sample_log_concave(stream: Keystream, n: int, bucket_bits: int, log_ratio: LogRatio) -> np.ndarray:
    """n int64 y with probabilities ∝ exp(log_ratio(y)), a log-concave law with its peak at 0.

    Two in five proposals are accepted if a bucket is one to two standard deviations wide.
    """
    peak = _peak(bucket_bits, log_ratio)
    out = np.empty(n, np.int64)
    filled = 0
    while filled < n:
        y, bucket, valid = _propose(stream, min(_CHUNK, 3 * (n - filled) + 32), bucket_bits)
        accepted = valid & (stream.exponentials(y.size) >= peak - log_ratio(y) - bucket)
        found = y[accepted][: n - filled]
        out[filled : filled + found.size] = found
        filled += found.size
    return out


def _propose(stream: Keystream, n: int, bucket_bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, its bucket, and whether it counts: zero has two signs, one of which doesn't."""
    words = stream.words(n).view(np.int64)
    bucket = np.floor(stream.exponentials(n))
    magnitude = (words & ((1 << bucket_bits) - 1)) + (bucket.astype(np.int64) << bucket_bits)
    negative = words < 0
    return np.where(negative, -magnitude, magnitude), bucket, ~(negative & (magnitude == 0))


def _peak(bucket_bits: int, log_ratio: LogRatio) -> float:
    """c. A bucket is likeliest at its inner end; over buckets log p + V is concave: climb until it no longer rises."""
    best, bucket = -np.inf, 0
    while True:
        y = bucket << bucket_bits
        here = float(log_ratio(np.array([y, -y])).max()) + bucket
        if here <= best:
            return best + _SLACK
        best, bucket = here, bucket + 1


def _bits_for(scale: float) -> int:
    return max(0, ceil(log2(scale)))


def discrete_gaussian(stream: Keystream, n: int, sigma: float) -> np.ndarray:
    """P(y) ∝ exp(−y²/2σ²) over the integers."""
    if not 0 < sigma <= MAX_SCALE:
        raise ValueError(f"sigma must lie in (0, 2^40] (got {sigma})")

    def log_ratio(y: np.ndarray) -> np.ndarray:
        return np.square(y / sigma) * -0.5

    return sample_log_concave(stream, n, _bits_for(sigma), log_ratio)


def rounded_laplace(stream: Keystream, n: int, scale: float) -> np.ndarray:
    """The nearest integer to a Laplace number of this scale.

    Not quite the two-sided geometric law: zero is a little rarer here. But what is rounded is post-processing of
    the continuous mechanism, so that its whole privacy-loss distribution (not only ε) can be claimed.
    """
    if not 1 <= scale <= MAX_SCALE:
        raise ValueError(f"scale must lie in [1, 2^40] (got {scale})")
    half = 0.5 / scale
    at_zero = log(-expm1(-half) / sinh(half))

    def log_ratio(y: np.ndarray) -> np.ndarray:
        return np.where(y == 0, at_zero, np.abs(y) / -scale)

    return sample_log_concave(stream, n, _bits_for(scale), log_ratio)


def skellam(stream: Keystream, n: int, sigma: float) -> np.ndarray:
    """The difference of two Poisson numbers of mean σ²/2 each: variance σ², and closed under addition."""
    if not 1 / MAX_SKELLAM_SIGMA <= sigma <= MAX_SKELLAM_SIGMA:
        raise ValueError(f"sigma must lie in [2^-24, 2^24] (got {sigma})")
    mean = sigma * sigma / 2
    difference: np.ndarray = poisson(stream, n, mean) - poisson(stream, n, mean)
    return difference


def poisson(stream: Keystream, n: int, mean: float) -> np.ndarray:
    mode = int(mean)
    at_mode = float(_log_poisson(np.array([mode]), mean)[0])

    def log_ratio(y: np.ndarray) -> np.ndarray:
        k = y + mode
        return np.where(k < 0, -np.inf, _log_poisson(np.maximum(k, 0), mean) - at_mode)

    out = sample_log_concave(stream, n, _bits_for(sqrt(mean)), log_ratio)
    out += mode
    return out


def _log_poisson(k: np.ndarray, mean: float) -> np.ndarray:
    """log P(k), up to the constant log √2π, in Loader's (2000) saddle-point form: no cancellation of large terms."""
    few = np.minimum(k, _SMALL - 1)
    direct: np.ndarray = few * log(mean) - mean - _LOG_FACTORIALS[few] + 0.5 * log(2 * np.pi)
    many = np.maximum(k, _SMALL).astype(np.float64)
    saddle: np.ndarray = -_stirling_error(many) - _deviance(many, mean) - 0.5 * np.log(many)
    return np.where(k < _SMALL, direct, saddle)


def _stirling_error(k: np.ndarray) -> np.ndarray:
    """log k! − log(√(2πk)·(k/e)ᵏ), to 2⁻⁵² for k ≥ 16."""
    w = 1 / np.square(k)
    series: np.ndarray = 1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w * (1 / 1188 - w * (691 / 360360)))))
    series /= k
    return series


def _deviance(k: np.ndarray, mean: float) -> np.ndarray:
    """k·log(k/mean) + mean − k. Near the mean by its series in v = (k − mean)/(k + mean), where it would cancel."""
    gap = k - mean
    v = gap / (k + mean)
    near = np.abs(v) < 0.1
    w = np.where(near, v * v, 0.0)
    series = np.zeros_like(w)
    for j in range(9, 0, -1):
        series = (series + 1 / (2 * j + 1)) * w
    return np.where(near, gap * v + 2 * k * v * series, k * np.log(k / mean) - gap)
