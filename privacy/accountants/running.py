"""ε after each round of a run, in milliseconds: the progress bar's accountant.

A run repeats one event. The distribution of its privacy loss is put on a grid once (by dp-accounting, pessimistically)
and Fourier transformed once; after n rounds it is the n-th power, transformed back over just the range that holds
all but 1e-15 of the mass (a Chernoff bound, whose moments are kept too). What a composition from scratch does again
every time is done once. Memory and time per round are bounded: when the range outgrows 2¹⁸ points, the next coarser
grid takes over, and at last (privacy losses spread over more than 1,300) RDP alone.

Each figure is an upper bound, as PLD's and RDP's are (the smaller of the two is returned), up to the rounding of
the transforms; it equals PLD from scratch within 0.001 + 2·n·h² (tests). n is the number of releases so far, h the
interval in use.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from dp_accounting import dp_event, get_epsilon_gaussian, pld
from dp_accounting.dp_event import DpEvent
from scipy import fft, signal

from privacy.accountants.pld import MIN_DELTA, single_reach, taken_leaves
from privacy.accountants.rdp import DEFAULT_ORDERS, NotTaken, curve_epsilon, rdp_curve
from privacy.accountants.support import LIBRARY_RELATION, Accountant, Leaves, Relation, leaves_of, normalise, supports

INTERVALS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
MAX_POINTS = 1 << 18
TAIL = 1e-15
"""Mass that may lie outside the range; counted as an infinite loss."""
_TILTS = np.geomspace(1e-2, 1e2, 21)


@dataclass
class LossGrid:
    """One direction of one release: mass at the losses (lowest + i)·interval, and at infinity."""

    interval: float
    lowest: int
    mass: np.ndarray
    infinite: float
    _spectrum: tuple[int, np.ndarray] = field(default=(0, np.empty(0)), repr=False)

    def __post_init__(self) -> None:
        self.mass = np.maximum(self.mass, 0.0)  # connecting the dots rounds to −1e-20 here and there
        positions = np.arange(len(self.mass)) * self.interval
        self._tilts = np.concatenate((-_TILTS, _TILTS))
        with np.errstate(divide="ignore"):
            log_mass = np.log(self.mass)
        self._log_moments = np.array([_log_sum(tilt * positions + log_mass) for tilt in self._tilts])

    def range_after(self, count: int) -> tuple[int, int]:
        """First and last position that matter after `count` releases, by Chernoff's bound at the best tilt."""
        bounds = (count * self._log_moments + math.log(2 / TAIL)) / (self._tilts * self.interval)
        half = len(_TILTS)
        low = max(0, math.floor(np.nanmax(bounds[:half])))
        high = min((len(self.mass) - 1) * count, math.ceil(np.nanmin(bounds[half:])))
        return low, max(low, high)

    def points_after(self, count: int) -> int:
        low, high = self.range_after(count)
        return high - low + 1

    def epsilon_after(self, count: int, delta: float) -> float:
        low, high = self.range_after(count)
        size = _transform_size(high - low + 1)
        composed = fft.irfft(_power(self._transformed(size), count), size)
        # Positions wrapped around modulo `size`; negative mass is rounding, and dropping it only adds loss.
        mass = np.maximum(np.roll(composed, -low % size)[: high - low + 1], 0.0)
        infinite = TAIL - math.expm1(count * math.log1p(-self.infinite))
        return least_epsilon(self.lowest * count + low, self.interval, mass, infinite, delta)

    def _transformed(self, size: int) -> np.ndarray:
        if self._spectrum[0] != size:
            rows = -(-len(self.mass) // size)
            folded = np.zeros(rows * size)
            folded[: len(self.mass)] = self.mass
            self._spectrum = (size, fft.rfft(folded.reshape(rows, size).sum(0)))
        return self._spectrum[1]


def _log_sum(exponents: np.ndarray) -> float:
    peak = exponents.max()
    return float(peak + math.log(np.exp(exponents - peak).sum()))


def _transform_size(points: int) -> int:
    """A fast length, in steps of about a fifth: rounds that need nearly the same share one transform."""
    step = 1 << max(4, points.bit_length() - 3)
    return int(fft.next_fast_len(-(-points // step) * step, real=True))


def _power(values: np.ndarray, count: int) -> np.ndarray:
    """By squaring: NumPy's complex power takes ten times as long."""
    result, square = np.ones_like(values), values
    while count:
        if count & 1:
            result = result * square
        count >>= 1
        if count:
            square = square * square
    return result


def least_epsilon(first: int, interval: float, mass: np.ndarray, infinite: float, delta: float) -> float:
    """The least ε ≥ 0 with δ(ε) = infinite + Σ_{x>ε} mass(x)·(1 − e^{ε−x}) ≤ delta."""
    if infinite > delta:
        return math.inf
    start = max(0, -first)  # losses below zero can't count
    losses = np.arange(first + start, first + len(mass)) * interval
    if not losses.size:
        return 0.0
    weighted = mass[start:]
    above = infinite + np.cumsum(weighted[::-1])[::-1]
    # Σ_{x ≥ losses[i]} mass(x)·e^{losses[i]−x}, from the end: relative to the first loss it would overflow beyond 709.
    scaled = signal.lfilter([1.0], [1.0, -math.exp(-interval)], weighted[::-1])[::-1]
    # δ at ε = losses[i], from the mass strictly above; it falls with i.
    at = np.append(above[1:], infinite) - (scaled - weighted)
    i = int(np.argmax(at <= delta))
    if above[i] <= delta:
        return 0.0
    epsilon = losses[i] + math.log((above[i] - delta) / scaled[i])
    return max(0.0, float(epsilon))


class RunningEpsilon:
    """ε after 1, 2, 3 … rounds of the same event.

    `after(rounds)` is a pure function; `add()` counts for the caller. Raises NotTaken if the accountant can't take
    the event at all. PRV has no running form.
    """

    def __init__(
        self, event_per_round: DpEvent, delta: float, relation: Relation = "add-remove", accountant: Accountant = "pld"
    ) -> None:
        if accountant == "prv":
            raise NotTaken("PRV has no running form; ask for pld or rdp")
        self.delta, self.relation, self.rounds = delta, relation, 0
        leaves = leaves_of(event_per_round)
        self._private = not any(isinstance(leaf, dp_event.NonPrivateDpEvent) for leaf in leaves)
        self._gaussian = _only_gaussian(leaves, relation) if accountant == "pld" else None
        self._curve = _curve_or_none(event_per_round, leaves, relation)
        if accountant == "rdp" and self._curve is None:
            rdp_curve(event_per_round, DEFAULT_ORDERS, relation)  # says what it does not take
        self._round: Leaves = taken_leaves(event_per_round, relation) if accountant == "pld" and self._private else {}
        self._use_pld = accountant == "pld" and delta >= MIN_DELTA and bool(self._round) and self._gaussian is None
        self._level, self._grids, self._per_round = 0, list[LossGrid](), 1
        while self._use_pld and self._level < len(INTERVALS) and self._base_points() > MAX_POINTS:
            self._level += 1

    def _base_points(self) -> float:
        return max(single_reach(leaf, self.relation) for leaf in self._round) / INTERVALS[self._level]

    def add(self, rounds: int = 1) -> float:
        """Count `rounds` more and return ε so far."""
        self.rounds += rounds
        return self.after(self.rounds)

    def after(self, rounds: int) -> float:
        if rounds < 0:
            raise ValueError(f"rounds must be ≥ 0 (got {rounds})")
        if not rounds:
            return 0.0
        if not self._private:
            return math.inf
        if self._gaussian is not None:
            return max(0.0, float(get_epsilon_gaussian(self._gaussian / math.sqrt(rounds), self.delta)))
        by_rdp = math.inf if self._curve is None else curve_epsilon(self._curve * rounds, self.delta)
        return min(by_rdp, self._by_pld(rounds)) if self._use_pld else by_rdp

    def _by_pld(self, rounds: int) -> float:
        if not self._grids:
            self._build()
        while self._level < len(INTERVALS):  # never back: a round's grid is no finer than the one before
            count = rounds * self._per_round
            if max(grid.points_after(count) for grid in self._grids) <= MAX_POINTS:
                return max(grid.epsilon_after(count, self.delta) for grid in self._grids)
            self._level += 1
            self._build()
        return math.inf

    def _build(self) -> None:
        if self._level < len(INTERVALS):
            self._grids, self._per_round = loss_grids(self._round, self.relation, INTERVALS[self._level])


def _only_gaussian(leaves: Leaves, relation: Relation) -> float | None:
    """The multiplier, if a round is nothing but Gaussian releases: then ε has a closed form (Balle and Wang 2018)."""
    if len(leaves) != 1:
        return None
    ((leaf, count),) = leaves.items()
    if not isinstance(leaf, dp_event.GaussianDpEvent):
        return None
    return float(normalise(leaf, relation, "rdp").noise_multiplier) / math.sqrt(count)


def _curve_or_none(event: DpEvent, leaves: Leaves, relation: Relation) -> np.ndarray | None:
    if all(supports("rdp", leaf, relation) for leaf in leaves):
        return rdp_curve(event, DEFAULT_ORDERS, relation)
    return None


def loss_grids(leaves: Leaves, relation: Relation, interval: float) -> tuple[list[LossGrid], int]:
    """The grids of one release, one per direction, and how many releases make a round."""
    repeated = next(iter(leaves.values())) if len(leaves) == 1 else 1
    accountant = pld.PLDAccountant(LIBRARY_RELATION[relation], interval)
    for leaf, count in leaves.items():
        accountant.compose(leaf, count if len(leaves) > 1 else 1)
    # dp-accounting gives out no masses; these fields are those of 0.6, which pyproject pins.
    found = accountant._pld
    directions = [found._pmf_remove] if found._symmetric else [found._pmf_remove, found._pmf_add]
    grids = []
    for direction in directions:
        dense = direction.to_dense_pmf()
        grids.append(LossGrid(interval, dense._lower_loss, np.asarray(dense._probs), dense._infinity_mass))
    return grids, repeated
