"""Client-level privacy, the client's half: one update, clipped over all of its arrays together.

The server clips again (`server_app/private_mean.py`), because the sensitivity of what it releases can't rest on what a
client says. Clipping here keeps an honest client's whole influence within the norm before anything leaves it.
"""

import math

import numpy as np

from fedplat.model import Arrays

_CHUNK = 1 << 13
"""Coordinates per dot product: OpenBLAS would spread larger ones over threads, whose number shows in the last bits."""
_SHRINK = 1 - 2.0**-20
_TRIES = 8


def clip_update(received: Arrays, trained: Arrays, clip_norm: float) -> tuple[Arrays, bool]:
    """What the client sends: x + clip(y − x); and whether ‖y − x‖ was within the clip norm.

    The norm is over all floating-point arrays together, in float64, and that of what is sent is ≤ clip_norm, rounding
    to the arrays' own types included. A NaN or an infinity anywhere makes the update zero, and counts as not within.
    Integer and boolean buffers are sent as they were received: they are no part of the release.
    """
    norm = _distance(received, trained)
    if norm <= clip_norm:
        return _moved(received, trained, 1.0), True
    if not math.isfinite(norm):
        return dict(received), False
    factor = clip_norm / norm
    for _ in range(_TRIES):
        sent = _moved(received, trained, factor)
        reached = _distance(received, sent)
        if reached <= clip_norm:
            return sent, False
        factor *= _SHRINK * clip_norm / reached
    # The types are too coarse for an update this small: weights of 2³⁰ in float32 only move by 128.
    return dict(received), False


def _moved(received: Arrays, trained: Arrays, factor: float) -> Arrays:
    """x + factor·(y − x) where floating-point; y itself for factor 1, without rounding twice."""
    moved = {}
    for name, x in received.items():
        if not np.issubdtype(x.dtype, np.floating):
            moved[name] = x
        elif factor == 1.0:
            moved[name] = trained[name]
        else:
            step = np.subtract(trained[name], x, dtype=np.float64)
            moved[name] = np.asarray(x + factor * step).astype(x.dtype)
    return moved


def _distance(received: Arrays, trained: Arrays) -> float:
    """L2 over floating-point arrays; infinite if anything is NaN, infinite or too large to square."""
    total = 0.0
    with np.errstate(all="ignore"):
        for name, x in received.items():
            if not np.issubdtype(x.dtype, np.floating):
                continue
            old, new = x.reshape(-1), trained[name].reshape(-1)
            for start in range(0, old.size, _CHUNK):
                part = slice(start, start + _CHUNK)
                step = np.subtract(new[part], old[part], dtype=np.float64)
                total += float(np.dot(step, step))
    return math.sqrt(total) if total >= 0 else math.inf
