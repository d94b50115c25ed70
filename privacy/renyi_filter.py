"""A Rényi filter with one order declared beforehand: the budget over jobs that are chosen one after the other.

Composition theorems fix all mechanisms in advance. A site does not: which job comes next depends on what earlier
ones released. A filter covers that (Feldman and Zrnic 2021; Lécuyer 2021): if every admitted mechanism has
RDP ρ_j at order α, given everything released before, and Σ ρ_j ≤ B always holds, the whole interaction is
(α, B)-RDP, and so (ε, δ)-DP with ε = B + log((α−1)/α) − (log δ + log α)/(α−1) (Canonne, Kamath and Steinke 2020).
For one α only: picking the best order afterwards is what the theorem does not allow. Orders start at 2: below, the
accountant has no finite bound for ordinary Poisson-sampled Gaussians, and a budget at such an order would refuse them.

One percent of δ is set aside for charges that come with an additive δ (truncated Poisson sampling, below); the
conversion uses the rest.
"""

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent
from scipy import stats

from fedplat.errors import UsageError
from privacy.accountants.support import Relation, leaves_of
from privacy.accounting import rdp_curve

ORDERS: tuple[float, ...] = (
    *(2 + i / 4 for i in range(24)),
    *(float(order) for order in range(8, 64)),
    *(64.0, 80.0, 96.0, 128.0, 192.0, 256.0, 384.0, 512.0, 1024.0),
)
SLACK_SHARE = 0.01


@dataclass(frozen=True)
class RenyiBudget:
    """(ε, δ) for everything, ever, enforced at one order. Sums are of RDP at that order."""

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        _check(self.epsilon, self.delta)
        if self.order not in ORDERS:
            raise UsageError(
                f"Rényi order {self.order:g} is not one of those allowed ({ORDERS[0]:g} to {ORDERS[-1]:g})"
            )
        if self.capacity <= 0:
            raise UsageError(
                f"a budget of ε = {self.epsilon:g} at δ = {self.delta:g} has no room at order {self.order:g}. "
                + _advice(self.epsilon, self.delta)
            )

    @property
    def capacity(self) -> float:
        """Most RDP, at the order, that may ever be spent."""
        return self.epsilon - conversion(self.order, self.delta)

    @property
    def slack_capacity(self) -> float:
        """Most additive δ that charges may bring."""
        return SLACK_SHARE * self.delta

    def epsilon_of(self, rdp_spent: float) -> float:
        """ε of what is spent so far, at the budget's δ. Nothing spent is 0; anything spent has a floor.

        While charges are admitted it is at most the budget's ε, and the budget's ε is what the filter proves for the
        whole interaction, wherever it stops. The running figure is a proof of its own only for an amount
        fixed beforehand: had it been the budget, the filter would have stopped exactly here.
        """
        if not rdp_spent >= 0:
            raise ValueError(f"spent RDP must be ≥ 0 (got {rdp_spent!r})")
        return max(0.0, rdp_spent + conversion(self.order, self.delta)) if rdp_spent else 0.0

    def admits(self, spent: float, asked: float, slack_spent: float = 0.0, slack_asked: float = 0.0) -> bool:
        """Whether a charge still fits. Infinite, negative and undefined amounts never do."""
        amounts = (spent, asked, slack_spent, slack_asked)
        if not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            return False
        return spent + asked <= self.capacity and slack_spent + slack_asked <= self.slack_capacity


def conversion(order: float, delta: float) -> float:
    """What is added to RDP at `order` to get ε, at the part of δ that is not set aside."""
    kept = (1 - SLACK_SHARE) * delta
    return math.log1p(-1 / order) - (math.log(kept) + math.log(order)) / (order - 1)


def best_order(epsilon: float, delta: float) -> float:
    """The order that admits most Gaussian releases: their RDP is α/(2σ²), so the greatest capacity per α.

    A default to declare before the first charge. Depends on the budget only, never on what was asked or spent.
    """
    _check(epsilon, delta)
    order = max(ORDERS, key=lambda candidate: (epsilon - conversion(candidate, delta)) / candidate)
    if epsilon <= conversion(order, delta):
        raise UsageError(f"a budget of ε = {epsilon:g} at δ = {delta:g} is too small. " + _advice(epsilon, delta))
    return order


def _check(epsilon: float, delta: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise UsageError(f"a budget's ε must be a finite number > 0 (got {epsilon:g})")
    if not 0 < delta < 1:
        raise UsageError(f"a budget's δ must be between 0 and 1 (got {delta:g})")


def _advice(epsilon: float, delta: float) -> str:
    room = [order for order in ORDERS if epsilon > conversion(order, delta)]
    if room:
        return f"Leave the order out (the best here is {best_order(epsilon, delta):g}), or raise ε."
    return f"Raise ε above {min(conversion(order, delta) for order in ORDERS):.3g}, or δ."


@dataclass(frozen=True)
class FilterCharge:
    """What one event costs a filter: RDP at its order, and an additive δ."""

    rdp: float
    slack: float = 0.0


def charge_of(event: DpEvent, budget: RenyiBudget, relation: Relation) -> FilterCharge:
    """The cost of an event to the budget. Truncated Poisson is charged as plain Poisson, plus its slack."""
    rdp, slack = 0.0, 0.0
    for leaf, count in leaves_of(event).items():
        charged = leaf
        if isinstance(leaf, dp_event.TruncatedSubsampledGaussianDpEvent):
            if relation != "zero-out":
                raise UsageError(f"truncated Poisson sampling has no bound under {relation}; account it as zero-out")
            noise = dp_event.GaussianDpEvent(leaf.noise_multiplier)
            charged = dp_event.PoissonSampledDpEvent(leaf.sampling_probability, noise)
            sizes = (leaf.dataset_size, leaf.sampling_probability, leaf.truncated_batch_size)
            slack += truncation_slack(*sizes, count, budget.epsilon)
        rdp += count * _rdp_at(charged, budget.order, relation)
    return FilterCharge(rdp, slack)


def _rdp_at(event: DpEvent, order: float, relation: Relation) -> float:
    """RDP at the order. It never decreases in the order, so the next whole order's bounds it too.

    At a fractional order dp-accounting bounds a series term by term: under much noise that is up to hundreds of times
    too much, near a sampling rate of 1/2 infinite. At whole orders the sum is finite and exact.
    """
    return float(np.min(rdp_curve(event, tuple({order, float(math.ceil(order))}), relation)))


def truncation_slack(n: int, q: float, max_batch: int, steps: int, epsilon: float) -> float:
    """Additive δ of cutting Poisson batches at `max_batch`, beside a plain Poisson sampler that is (ε, δ)-DP.

    (1 + e^ε) · steps · P[Binomial(n, q) > max_batch]. Proof. Couple M', the interaction with truncated batches, with
    M, the same with plain ones: same samples, same noise. They differ only if some sample exceeds `max_batch`; by the
    union bound that has probability at most τ = steps·P[Binomial(n, q) > max_batch], also when later steps depend on
    earlier outputs, since a sample's size does not. Under zero-out n is the same for both neighbours D and D', and
    so is τ. For every event E:

        P[M'(D) ∈ E] ≤ P[M(D) ∈ E] + τ ≤ e^ε·P[M(D') ∈ E] + δ + τ ≤ e^ε·P[M'(D') ∈ E] + δ + (1 + e^ε)·τ.  ∎

    Here ε is that of the whole claim (a filter's budget), not of one job; over several jobs the τ add up. How a sample
    is cut does not matter. Under add-remove n would differ between neighbours, and τ with it.
    """
    if not (n >= 1 and 0 < q <= 1 and max_batch >= 1 and steps >= 1 and epsilon >= 0):
        raise ValueError("n, max_batch and steps must be ≥ 1, 0 < q ≤ 1 and ε ≥ 0")
    too_large = float(stats.binom.sf(max_batch, n, q))
    return (1 + math.exp(min(epsilon, 700.0))) * steps * too_large
