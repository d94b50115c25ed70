"""Gaussian noise on a grid, safe in floating point and fast enough for every step of training.

Normals come from the Ziggurat (Marsaglia & Tsang 2000; 1024 layers) in float64, vectorised over a cryptographic
keystream. `add_gaussian` returns `value + std·x` rounded to the grid γ, the largest power of two ≤ std·2⁻¹². Textbook
float noise leaks because the set of reachable floats depends on the value (Mironov 2012); here all values reach the
same grid, and rounding after the addition is post-processing of the ideal Gaussian: sensitivity does not grow.

How near the ideal. A cell of the grid is wider than 2⁻¹³ std. The lattice of x has steps below 2⁻⁵⁰; together with
the float64 operations up to the rounding, that moves a point by less than 2⁻⁴⁸ std inside ±4 std and 2⁻⁴⁶ std inside
±8 std, whatever the value: if one is beyond ±4 std, all are split into grid point and remainder first. So the
probability of a cell is right to a relative error of 2⁻³⁴ inside ±4 std, 2⁻³² inside ±8 std, and growing like |x|
beyond (once in 2⁴⁹ draws). Its mean square is below 2⁻⁶⁷; over 2⁴⁰ coordinates our law P̃ and the ideal P are
D_β(P̃‖P) ≤ β·2⁻²⁸ apart. Mironov's (2017, Prop. 11) triangle inequality with p = 2¹², used on both sides, gives for
orders 2 ≤ α ≤ 2⁸: D_α(ours) ≤ (1 + 2⁻¹²)·D_α′(ideal) + α·2⁻¹⁴ with α′ ≤ (1 + 2⁻¹⁰)·α. The accountants are told of the
ideal Gaussian. Taken for granted: AES, and elementary functions in NumPy that err by a few units in the last place.

float32 holds the grid exactly while |result| < 2²⁴γ (at least 2¹¹ std); beyond, and for float64 beyond 2⁵³γ, the grid
point is rounded once more: post-processing too. Not claimed: constant time (how long a draw takes depends on it).
"""

from collections.abc import Callable, Iterator
from math import erfc, exp, frexp, ldexp, log, pi, sqrt
from typing import Protocol

import numpy as np

from privacy.randomness import Keystream

GRID_BITS = 12
STD_RANGE = (2.0**-100, 2.0**100)
MAX_MAGNITUDE = 2.0**128
"""Beyond every float32."""
_LAYERS = 1024
_CHUNK = 1 << 15
"""Normals per pass of the fast path: few enough for the cache, enough that NumPy's calls cost little beside them."""
BLOCK = 1 << 18
"""Normals per pass of the slow path, which sees one in two hundred of them."""
_NEAR = 4.0
"""Values up to that many std are added to noise as they are."""


def _tables() -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """r and, per layer, its half width, the half width of the layer above it, and the heights f(x) of their edges.

    All layers have the area v = r·f(r) + ∫ᵣ^∞ f; r is bisected until the topmost one ends at f(0) = 1.
    """

    def edges(r: float) -> tuple[list[float], float]:
        v = r * exp(-r * r / 2) + sqrt(pi / 2) * erfc(r / sqrt(2))
        widths, height = [v / exp(-r * r / 2), r], exp(-r * r / 2)
        while len(widths) < _LAYERS:
            height += v / widths[-1]
            if height >= 1:
                return widths, 2.0
            widths.append(sqrt(-2 * log(height)))
        return widths, height + v / widths[-1]

    low, high = 3.0, 5.0
    while (r := (low + high) / 2) not in (low, high):
        low, high = (r, high) if edges(r)[1] > 1 else (low, r)
    widths = np.array([*edges(high)[0], 0.0])
    heights = np.exp(-(widths**2) / 2)
    heights[0] = 0.0
    return high, widths[:-1], widths[1:], heights


_R, _WIDTH, _INNER, _HEIGHT = _tables()
_STEP = _WIDTH * 2.0**-53


class Normals(Protocol):
    """A source of standard normals in place of a `Keystream`, such as `privacy.noise_ahead.NoiseAhead`."""

    def pieces(self, n: int) -> Iterator[np.ndarray]:
        """n normals, flat, which the caller may overwrite; each piece is valid until the next one is asked for."""
        ...


class _Scratch:
    """The buffers of one fast pass."""

    def __init__(self, size: int) -> None:
        self.words = np.empty(size, np.int64)
        self.layer = np.empty(size, np.int64)
        self.edge = np.empty(size)
        self.size = np.empty(size)
        self.own = np.empty(size)
        self.outside = np.empty(size, np.bool_)


def _fast_pass(stream: Keystream, out: np.ndarray, scratch: _Scratch) -> tuple[np.ndarray, np.ndarray]:
    """Points uniform in their layers, and which of them (with their layers) lie outside of the sure part."""
    n = out.size
    words, layer, edge, size = scratch.words[:n], scratch.layer[:n], scratch.edge[:n], scratch.size[:n]
    stream.fill(words)
    np.bitwise_and(words, _LAYERS - 1, out=layer)
    np.right_shift(words, 10, out=words)  # 54 bits with sign: float64 holds them exactly
    np.copyto(out, words)
    np.take(_STEP, layer, out=edge, mode="wrap")
    np.multiply(out, edge, out=out)
    np.take(_INNER, layer, out=edge, mode="wrap")
    np.abs(out, out=size)
    outside = np.greater_equal(size, edge, out=scratch.outside[:n])
    where = np.flatnonzero(outside)
    return where, layer[where]


def _tail(stream: Keystream, n: int) -> np.ndarray:
    """|x| of normals beyond r, by exponential rejection."""
    out = np.empty(n)
    left = np.arange(n)
    while left.size:
        x = stream.exponentials(left.size)
        x /= _R
        accepted = 2 * stream.exponentials(left.size) >= x * x
        out[left[accepted]] = x[accepted] + _R
        left = left[~accepted]
    return out


def _settle(stream: Keystream, out: np.ndarray, where: np.ndarray, layer: np.ndarray) -> None:
    """The slow path: wedges by the density, the base strip by the tail; what is refused is drawn anew."""
    while where.size:
        x = out[where]
        low, high = _HEIGHT[layer], _HEIGHT[layer + 1]
        accepted = low + stream.uniforms(x.size) * (high - low) < np.exp(-0.5 * x * x)
        base = np.flatnonzero(layer == 0)
        out[where[base]] = np.copysign(_tail(stream, base.size), x[base])
        accepted[base] = True
        where = where[~accepted]
        fresh = np.empty(where.size)
        again, layer = _fast_pass(stream, fresh, _Scratch(where.size))
        out[where] = fresh
        where = where[again]


def normals_into(stream: Keystream, out: np.ndarray, scratch: _Scratch | None = None) -> None:
    """Fill a flat, contiguous float64 array with independent N(0, 1)."""
    scratch = scratch or _Scratch(min(out.size, _CHUNK))
    for first in range(0, out.size, BLOCK):
        block = out[first : first + BLOCK]
        wheres, layers = [], []
        for start in range(0, block.size, _CHUNK):
            where, layer = _fast_pass(stream, block[start : start + _CHUNK], scratch)
            where += start
            wheres.append(where)
            layers.append(layer)
        _settle(stream, block, np.concatenate(wheres), np.concatenate(layers))


def standard_normals(stream: Keystream, n: int) -> np.ndarray:
    """n independent N(0, 1) in float64."""
    out = np.empty(n)
    normals_into(stream, out)
    return out


def grid_of(std: float) -> float:
    """γ: the largest power of two ≤ std·2⁻¹²."""
    if not STD_RANGE[0] <= std <= STD_RANGE[1]:
        raise ValueError(f"the standard deviation of noise must lie in [2^-100, 2^100] (got {std})")
    return ldexp(1.0, frexp(std)[1] - 1 - GRID_BITS)


def add_gaussian(
    values: np.ndarray, std: float, stream: Keystream | Normals, out: np.ndarray | None = None
) -> np.ndarray:
    """values + N(0, std²) on the grid γ, independently per coordinate; `out` may be `values` itself.

    Values are flat, contiguous, float32 or float64, and finite: the caller has zeroed what was not.
    """
    if values.ndim != 1 or not values.flags.c_contiguous or values.dtype not in (np.float32, np.float64):
        raise ValueError("values must be a flat, contiguous array of float32 or float64")
    largest = max(float(values.max()), -float(values.min())) if values.size else 0.0
    if not largest < MAX_MAGNITUDE:  # NaN is not below anything
        raise ValueError("values must be finite and below 2^128: zero what is not before noise is added")
    out = np.empty_like(values) if out is None else out
    if out.shape != values.shape or out.dtype != values.dtype:
        raise ValueError("out must have the shape and dtype of values")
    grid, first = grid_of(std), 0
    add = _add_near if largest <= _NEAR * std else _add_split
    scratch = _Scratch(min(values.size, _CHUNK))
    n = values.size
    for normals in normal_pieces(stream, n, scratch) if isinstance(stream, Keystream) else stream.pieces(n):
        block = slice(first, first + normals.size)
        _add_block(add, values[block], normals, std / grid, grid, out[block], scratch)
        first += normals.size
    return out


def normal_pieces(stream: Keystream, n: int, scratch: _Scratch | None = None) -> Iterator[np.ndarray]:
    """n normals, a block at a time in one buffer, which the caller may overwrite."""
    buffer, scratch = np.empty(min(n, BLOCK)), scratch or _Scratch(min(n, _CHUNK))
    for first in range(0, n, BLOCK):
        piece = buffer[: min(BLOCK, n - first)]
        normals_into(stream, piece, scratch)
        yield piece


def _add_block(
    add: Callable[[np.ndarray, np.ndarray, _Scratch], None],
    values: np.ndarray,
    normals: np.ndarray,
    scale: float,
    grid: float,
    out: np.ndarray,
    scratch: _Scratch,
) -> None:
    """out = γ·⌊v + scale·x⌉ for v = values/γ, a chunk at a time; `add` gives the rounded sum, in place of scale·x.

    Normals are only read: they may come from another core's cache, and a changed line would have to go back there.
    """
    for start in range(0, values.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        x = np.multiply(normals[part], scale, out=scratch.own[: normals[part].size])
        v = scratch.size[: x.size]
        np.copyto(v, values[part])
        np.multiply(v, 1 / grid, out=v)
        add(x, v, scratch)
        np.multiply(x, grid, out=x)
        with np.errstate(over="ignore"):
            np.copyto(out[part], x, casting="same_kind")


def _add_near(x: np.ndarray, v: np.ndarray, _: _Scratch) -> None:
    """x = ⌊v + x⌉: neither is large, so their float64 sum is near the exact one."""
    np.add(x, v, out=x)
    np.rint(x, out=x)


def _add_split(x: np.ndarray, v: np.ndarray, scratch: _Scratch) -> None:
    """x = ⌊v⌉ + ⌊(v − ⌊v⌉) + x⌉: the sum that is rounded is small, whatever v is."""
    point = np.rint(v, out=scratch.edge[: v.size])
    np.subtract(v, point, out=v)
    _add_near(x, v, scratch)
    np.add(x, point, out=x)
