"""Rényi differential privacy (Mironov 2017; sampled Gaussian: Mironov, Talwar and Zhang 2019), by dp-accounting.

RDP adds up: the curve of a composition is the sum of its leaves' curves, each computed once and scaled by its count.
That is what makes a filter possible (`privacy.renyi_filter`). Always an upper bound on ε, looser than PLD by
4-289 % in PRIVACY.md's 36 settings. A curve below zero can only be rounding, and is lifted to zero.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event, rdp
from dp_accounting.dp_event import DpEvent

from privacy.accountants.support import LIBRARY_RELATION, Relation, kind_of, leaves_of, normalise, supports

DEFAULT_ORDERS: tuple[float, ...] = tuple(float(order) for order in rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)

# dp-accounting warns on stderr when a fractional order's series does not converge. It then leaves that order out,
# which can only loosen the bound: nothing to tell a person.
logging.getLogger("absl").addFilter(lambda record: "_compute_log_a_frac" not in record.getMessage())


class NotTaken(ValueError):
    """An accountant that does not take an event under a relation, or not at this size; says why."""


def rdp_curve(event: DpEvent, orders: Sequence[float], relation: Relation = "add-remove") -> np.ndarray:
    """RDP of the whole event at each order. Raises NotTaken if RDP has no bound for a part of it."""
    total = np.zeros(len(orders))
    for leaf, count in leaves_of(event).items():
        if not supports("rdp", leaf, relation):
            raise NotTaken(f"RDP does not take {kind_of(leaf) or type(leaf).__name__} under {relation}")
        total = total + count * _leaf_curve(leaf, tuple(map(float, orders)), relation)
    return total


@lru_cache(maxsize=4096)
def _leaf_curve(leaf: DpEvent, orders: tuple[float, ...], relation: Relation) -> np.ndarray:
    # The bound of repeat-and-select at one order uses the curve at others: give it all there are.
    asked = sorted({*orders, *DEFAULT_ORDERS}) if isinstance(leaf, dp_event.RepeatAndSelectDpEvent) else orders
    accountant = rdp.RdpAccountant(asked, LIBRARY_RELATION[relation])
    curve = np.maximum(accountant.compose(normalise(leaf, relation, "rdp")).rdp, 0.0)
    picked = curve if asked is orders else np.array([curve[asked.index(order)] for order in orders])
    picked.flags.writeable = False  # shared by all callers
    return picked


def rdp_epsilon(event: DpEvent, delta: float, relation: Relation = "add-remove") -> float:
    """ε by the best of the default orders (conversion: Canonne, Kamath and Steinke 2020, Proposition 12)."""
    return curve_epsilon(rdp_curve(event, DEFAULT_ORDERS, relation), delta)


def curve_epsilon(curve: np.ndarray, delta: float) -> float:
    if not np.any(curve):
        return 0.0
    return max(0.0, float(rdp.compute_epsilon(DEFAULT_ORDERS, curve, delta)[0]))
