"""Privacy random variables (Gopi, Lee and Wutschitz 2021), by Opacus: an independent witness, on a leash.

Opacus knows Gaussians, Poisson-sampled or not, in the direction "remove" only (equal to the maximum of both directions
in all cases of PRIVACY.md 3.2), and returns its upper end: the estimate plus 0.01. Its grid has no limit: for
q = 0.1, σ = 0.3 and 10,000 steps it grew to 24 GB. So the grid is sized beforehand, with RDP, and refused if large.
"""

import math
import warnings

import numpy as np
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent

from privacy.accountants.rdp import NotTaken, rdp_epsilon
from privacy.accountants.support import Relation, kind_of, leaves_of, normalise, supports

EPSILON_ERROR = 0.01
MAX_EPSILON = 700.0
MAX_POINTS = 2_500_000
"""Grid points over all distinct entries: about 450 MB and 3 s at the limit (measured)."""

Entry = tuple[float, float, int]
"""Noise multiplier, sample rate, count: Opacus' history."""


def prv_epsilon(event: DpEvent, delta: float, relation: Relation = "add-remove") -> float:
    """Upper bound on ε. Raises NotTaken for events that PRV does not know and for grids beyond the limit."""
    history = _history(event, relation)
    if history is None:
        return math.inf
    if not history:
        return 0.0
    points = grid_points(event, history, delta, relation)
    if points > MAX_POINTS:
        raise NotTaken(f"PRV would need a grid of {points:.2g} points (limit {MAX_POINTS:.2g})")
    return _opacus_epsilon(history, delta)


def _history(event: DpEvent, relation: Relation) -> list[Entry] | None:
    """What Opacus' accountant is to compose; None if a part is not private at all."""
    history: list[Entry] = []
    for leaf, count in leaves_of(event).items():
        if not supports("prv", leaf, relation):
            raise NotTaken(f"PRV does not take {kind_of(leaf) or type(leaf).__name__} under {relation}")
        seen = normalise(leaf, relation, "prv")
        if isinstance(seen, dp_event.NonPrivateDpEvent):
            return None
        rate = seen.sampling_probability if isinstance(seen, dp_event.PoissonSampledDpEvent) else 1.0
        noise = seen.event.noise_multiplier if rate < 1 else seen.noise_multiplier
        history.append((noise, rate, count))
    return history


def grid_points(event: DpEvent, history: list[Entry], delta: float, relation: Relation) -> float:
    """Points of Opacus' grid, from its own formulas: twice the range of the privacy loss over the mesh."""
    delta_error, total = delta / 1000, sum(count for _, _, count in history)
    reach = rdp_epsilon(event, delta_error / 4, relation)
    for leaf in leaves_of(event):
        reach = max(reach, rdp_epsilon(leaf, delta_error / (8 * total), relation))
    mesh = EPSILON_ERROR / math.sqrt(total * math.log(12 / delta_error) / 2)
    return 2 * (reach + 3) / mesh * len(history)


def _opacus_epsilon(history: list[Entry], delta: float) -> float:
    from opacus.accountants import PRVAccountant  # imports torch

    accountant = PRVAccountant()
    accountant.history = history
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            epsilon = float(accountant.get_epsilon(delta, eps_error=EPSILON_ERROR))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise NotTaken(f"PRV gave up: {error}") from error
    if not math.isfinite(epsilon):
        raise NotTaken("PRV found no finite ε")
    if epsilon > MAX_EPSILON:
        raise NotTaken(f"PRV: ε beyond {MAX_EPSILON:g} is cut off where e^ε leaves a float's range")
    return max(0.0, epsilon)
