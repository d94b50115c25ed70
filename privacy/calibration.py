"""The least noise for a target ε: ε(solve_noise(ε*)) ≤ ε*, and a thousandth less noise would be too little.

ε falls with the noise multiplier (more noise is post-processing of less). In logarithms it is nearly a straight line,
so a secant inside a bracket needs few calls: RDP brackets in milliseconds, PLD on a coarse grid comes close, and
the claiming accountant takes the last few steps. The answer is rounded up to five significant digits and
checked once more, by the same call that will be used to report it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting.dp_event import DpEvent

from fedplat.errors import UsageError
from privacy.accountants.pld import pld_epsilon
from privacy.accounting import Accountant, NotTaken, Relation, check_delta, epsilon

LEAST, MOST = 0.1, 1e6
"""Where the search stops. With less noise than LEAST a single release costs ε in the hundreds."""
DIGITS = 5
TOLERANCE = 5e-6
COARSE_INTERVAL = 1e-3

EventOf = Callable[[float], DpEvent]
EpsilonOf = Callable[[float], float]


def solve_noise(
    event_of: EventOf,
    target_epsilon: float,
    delta: float,
    relation: Relation = "add-remove",
    accountant: Accountant = "pld",
) -> float:
    """The least noise multiplier z, to five digits, for which `event_of(z)` costs at most the target."""
    check_target(target_epsilon)
    check_delta(delta)

    def exact(noise: float) -> float:
        return epsilon(event_of(noise), delta, relation, accountant)

    coarse = _coarse(event_of, delta, relation, exact) if accountant == "pld" else exact
    line = _Line(math.log(_enough(_rough(event_of, delta, relation, coarse), target_epsilon)), -2.0)
    if accountant == "pld":
        line = _search(coarse, target_epsilon, line)
    noise = _round_up(math.exp(_search(exact, target_epsilon, line).log_noise))
    step = 2 * 10.0**-DIGITS
    while exact(noise) > target_epsilon:
        noise, step = _round_up(noise * (1 + step)), step * 2
    return noise


def check_target(target_epsilon: float) -> None:
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise UsageError(f"ε must be a finite number > 0 (got {target_epsilon:g}). Usual: 1 to 10.")


def _rough(event_of: EventOf, delta: float, relation: Relation, otherwise: EpsilonOf) -> EpsilonOf:
    """RDP, where it takes the event."""

    def by_rdp(noise: float) -> float:
        return epsilon(event_of(noise), delta, relation, "rdp")

    try:
        by_rdp(1.0)
    except UsageError:
        return otherwise
    return by_rdp


def _coarse(event_of: EventOf, delta: float, relation: Relation, exact: EpsilonOf) -> EpsilonOf:
    def by_coarse_pld(noise: float) -> float:
        try:
            return pld_epsilon(event_of(noise), delta, relation, COARSE_INTERVAL)
        except NotTaken:
            return exact(noise)

    return by_coarse_pld


def _enough(rough: EpsilonOf, target: float) -> float:
    """A noise that is enough, at most twice the least that the rough accountant asks for."""
    noise = 1.0
    while rough(noise) > target:
        noise *= 2
        if noise > MOST:
            raise UsageError(
                f"no noise multiplier up to {MOST:g} gives ε ≤ {target:g}. Raise ε or δ, or plan fewer steps."
            )
    while noise > LEAST and rough(noise / 2) <= target:
        noise /= 2
    return noise


@dataclass(frozen=True)
class _Line:
    """Where log ε meets the target, as far as known: log noise, and the slope of log ε there."""

    log_noise: float
    slope: float


def _search(of: EpsilonOf, target: float, line: _Line) -> _Line:
    """Secant steps; halving where they would leave the bracket (ε of 0 or infinity has no slope)."""
    floor, slope = math.log(LEAST), line.slope
    x, low, high = max(line.log_noise, floor), floor, math.log(MOST) + 1
    before: tuple[float, float] | None = None
    for _ in range(60):
        excess = math.log(min(max(of(math.exp(x)), 1e-9), 1e9) / target)
        low, high = (x, high) if excess > 0 else (low, x)
        if abs(excess) <= TOLERANCE or high - low <= TOLERANCE:
            break
        if before is not None and (secant := (excess - before[1]) / (x - before[0])) < -0.05:
            slope = secant
        before, step = (x, excess), x - excess / slope
        if step <= low:
            # At the floor, look whether it is enough; elsewhere the secant was wrong.
            step = floor if low == floor and before[0] != floor else (low + high) / 2
        x = step if step < high else (low + high) / 2
    return _Line(x, slope)


def _round_up(noise: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(noise)) - DIGITS + 1)
    return float(f"{math.ceil(noise / unit - 1e-9) * unit:.{DIGITS - 1}e}")
