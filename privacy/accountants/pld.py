"""Privacy loss distributions, by dp-accounting: both directions, rounded pessimistically ("connect the dots",
Doroshenko et al. 2022). The figure that a job fixed in advance claims.

An upper bound on ε whatever the interval; how much above is measured, not proven: at most 2·n·h² for n releases on
a grid of interval h (PRIVACY.md 3.2 and tests). The Fourier transforms inside round at about 1e-15 of δ, which is why
a δ below 1e-11 is left to RDP, and the grid grows with ε, which is why an ε beyond 1,000 is too.
"""

import math
from collections.abc import Mapping

from dp_accounting import dp_event, pld
from dp_accounting.dp_event import DpEvent
from dp_accounting.pld.common import compute_self_convolve_bounds
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from privacy.accountants.rdp import NotTaken, rdp_epsilon
from privacy.accountants.support import LIBRARY_RELATION, Leaves, Relation, kind_of, leaves_of, normalise, supports

INTERVAL = 1e-4
MANY_LEAVES = 8
SLOW_INTERVAL = 5e-4
"""For many different leaves, and for mixtures, whose points dp-accounting finds one by one."""
MIN_DELTA = 1e-11
MAX_EPSILON = 1000.0
MANY_RELEASES = 100_000
ROUNDING = 2.0**-52
"""Of each factor of a transform that is raised to the power of the number of releases."""
MAX_POINTS = 1 << 23
"""Of a grid of many releases: about 1 GB and 3 s at the limit."""
TRUNCATED = 1e-15
"""dp-accounting's own: mass that a composition may cut off."""
_COARSE: tuple[tuple[float, float], ...] = ((80.0, INTERVAL), (200.0, 5e-4), (MAX_EPSILON, 1e-3))
"""Largest privacy loss that each interval is used for, so that a grid stays around a million points."""


def pld_epsilon(
    event: DpEvent, delta: float, relation: Relation = "add-remove", least_interval: float = INTERVAL
) -> float:
    """Upper bound on ε. Raises NotTaken for events PLD does not know, δ below 1e-11 and ε beyond 1,000."""
    leaves = taken_leaves(event, relation)
    if any(isinstance(leaf, dp_event.NonPrivateDpEvent) for leaf in leaves):
        return math.inf
    if not leaves:
        return 0.0
    if delta < MIN_DELTA:
        raise NotTaken(f"PLD: δ = {delta:g} is near the rounding of its Fourier transforms (least {MIN_DELTA:g})")
    interval = max(least_interval, interval_for(leaves, delta, relation))
    accountant = pld.PLDAccountant(LIBRARY_RELATION[relation], interval)
    for leaf, count in leaves.items():
        if count > MANY_RELEASES:
            if count * ROUNDING > delta / 100:
                raise NotTaken(f"PLD: {count:.3g} releases round its Fourier transforms by more than δ / 100")
            accountant._pld = accountant._pld.compose(_many(leaf, count, relation, interval))
        else:
            accountant.compose(leaf, count)
    epsilon = float(accountant.get_epsilon(delta))
    if math.isinf(epsilon):
        raise NotTaken(f"PLD found no finite ε at δ = {delta:g}")
    return max(0.0, epsilon)


def _many(leaf: DpEvent, count: int, relation: Relation, interval: float) -> PrivacyLossDistribution:
    """Many releases of one event, with the grid's size known before it is made.

    dp-accounting keeps few points in a dictionary and raises their number to the power of `count` to see whether that
    will do (for ever, in whole numbers), and its Chernoff bound for a dense grid has tilts that end at one over the
    grid's length: beyond some number of releases the grid grows with that number.
    """
    single = pld.PLDAccountant(LIBRARY_RELATION[relation], interval)
    single.compose(leaf, 1)
    found = single._pld  # dp-accounting gives out no masses; these fields are those of 0.6, which pyproject pins
    directions = [found._pmf_remove] if found._symmetric else [found._pmf_remove, found._pmf_add]
    dense = [direction.to_dense_pmf() for direction in directions]
    for direction in dense:
        low, high = compute_self_convolve_bounds(direction._probs, count, TRUNCATED)
        if high - low > MAX_POINTS:
            raise NotTaken(
                f"PLD: {count:.3g} releases would need a grid of {high - low:.2g} points (limit {MAX_POINTS:.2g})"
            )
    return PrivacyLossDistribution(*dense).self_compose(count)


def taken_leaves(event: DpEvent, relation: Relation) -> Leaves:
    leaves = leaves_of(event)
    for leaf in leaves:
        if not supports("pld", leaf, relation):
            raise NotTaken(f"PLD does not take {kind_of(leaf) or type(leaf).__name__} under {relation}")
    return {normalise(leaf, relation, "pld"): count for leaf, count in leaves.items()}


def interval_for(leaves: Mapping[DpEvent, int], delta: float, relation: Relation) -> float:
    """The finest interval whose grid stays small, from a rough idea of the largest privacy loss."""
    reach = _reach(leaves, delta, relation)
    for largest, interval in _COARSE:
        if reach <= largest:
            slow = len(leaves) > MANY_LEAVES or any(isinstance(x, dp_event.MixtureOfGaussiansDpEvent) for x in leaves)
            return max(interval, SLOW_INTERVAL) if slow else interval
    raise NotTaken(f"PLD: privacy loss around {reach:.3g} (limit {MAX_EPSILON:g}); that much is no privacy to speak of")


def _reach(leaves: Mapping[DpEvent, int], delta: float, relation: Relation) -> float:
    """How far privacy losses reach: of all releases together, by RDP, and of a single one."""
    together = [dp_event.SelfComposedDpEvent(_stand_in(leaf, relation), count) for leaf, count in leaves.items()]
    single = max(single_reach(leaf, relation) for leaf in leaves)
    return max(rdp_epsilon(dp_event.ComposedDpEvent(together), delta), single)


def single_reach(leaf: DpEvent, relation: Relation) -> float:
    """About the largest loss of one release on its grid: all but 1e-22 of the noise's mass is kept."""
    noise = _least_noise(leaf, relation)
    return 1 / (2 * noise**2) + 10 / noise


def _least_noise(leaf: DpEvent, relation: Relation) -> float:
    """Noise over the largest sensitivity. A Laplace counts as a Gaussian: it reaches less far, 1/noise."""
    doubled = 2.0 if relation == "replace-one" else 1.0
    if isinstance(leaf, dp_event.MixtureOfGaussiansDpEvent):
        return float(leaf.standard_deviation / max(*leaf.sensitivities, 1e-9))
    inner = leaf.event if isinstance(leaf, dp_event.PoissonSampledDpEvent) else leaf
    return float(inner.noise_multiplier / doubled)


def _stand_in(leaf: DpEvent, relation: Relation) -> DpEvent:
    """A Gaussian release that RDP takes and whose losses are about as large. It sizes grids and claims nothing."""
    rate, noise = 1.0, _least_noise(leaf, relation)
    if isinstance(leaf, dp_event.PoissonSampledDpEvent | dp_event.TruncatedSubsampledGaussianDpEvent):
        rate = leaf.sampling_probability
    if isinstance(leaf, dp_event.MixtureOfGaussiansDpEvent):
        pairs = list(zip(leaf.sensitivities, leaf.sampling_probs, strict=True))
        rate = min(1.0, max(1e-9, sum(p for c, p in pairs if c > 0)))
        noise = leaf.standard_deviation * rate / max(1e-9, sum(p * c for c, p in pairs))  # the mean, if present
    return dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise))
