"""The adaptive clip norm (Andrew et al. 2021, "Differentially private learning with adaptive clipping").

The clip norm follows a quantile of norms by a geometric update, C ← C·exp(−η·(b̃ − γ)), where b̃ is a *noisy* share
of norms within C. Each summand is ±½, half the sensitivity of a count; what sum and count cost together is in
`privacy.events.adaptive_clip_noise`. The share is taken of a public constant, never of the number of summands, so
missing ones pull it towards ½, never towards less noise.
"""

import math

import numpy as np

from fedplat.privacy_section import AdaptiveClip
from privacy.gaussian import add_gaussian
from privacy.randomness import Keystream

RANGE = (2.0**-20, 2.0**20)
"""Where a clip norm stays, however the noise falls: far from where float32 or the noise grid ends. Powers of two: the
ends travel as float32 and must arrive as what they were."""


def noisy_share(below: float, summands: int, normaliser: float, count_noise: float, stream: Keystream) -> float:
    """The released share of norms below the clip norm."""
    centred = np.array([below - summands / 2])
    if count_noise > 0:
        add_gaussian(centred, count_noise, stream, out=centred)
    return float(centred[0]) / normaliser + 0.5


def next_clip_norm(clip_norm: float, share: float, settings: AdaptiveClip) -> float:
    """One geometric step: C ← C·exp(−lr·(share − quantile)); each step at most by the factor e."""
    step = -settings.lr * (share - settings.quantile)
    return min(max(clip_norm * math.exp(min(max(step, -1.0), 1.0)), RANGE[0]), RANGE[1])


def require_clip_norm(value: float) -> float:
    """A clip norm that a server sent: noise is proportional to it, so any sensible one is equally private."""
    if not RANGE[0] <= value <= RANGE[1]:
        raise ValueError(f"clip norm {value} is outside of {RANGE[0]:g} … {RANGE[1]:g}")
    return value
