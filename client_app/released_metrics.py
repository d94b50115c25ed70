"""A private client's evaluation: sums of bounded per-example metrics and their count, released together with noise
once.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fedplat.wire import Identity
from privacy.randomness import insecure_stream, secure_stream

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan

LOSS_BOUND = 10.0
"""Losses are cut here: without a bound one example's loss could be anything. All other metrics are cut to [0, 1]."""


def release_metrics(
    plan: "PrivacyPlan", names: Collection[str], values: Mapping[str, Tensor], identity: Identity, seed: int
) -> dict[str, float]:
    """Noisy means, charged as `plan.evaluation_event`. A client without examples releases noise like any other."""
    from privacy.mechanisms import (
        MetricRelease,  # accountants and ledger take a second to load, and other jobs need neither
    )

    assert plan.section.evaluation_noise is not None
    bounds = {name: LOSS_BOUND if "loss" in name else 1.0 for name in sorted(names)}
    labels = (seed, identity.client, identity.round, identity.attempt)
    stream = insecure_stream("evaluate", *labels) if plan.section.insecure_noise else secure_stream()
    arrays = {name: values[name].cpu().numpy() if name in values else np.empty(0) for name in bounds}
    metrics, _ = MetricRelease(bounds, plan.section.evaluation_noise).release(arrays, stream)
    return metrics
