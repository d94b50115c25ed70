"""DP-FTRL by a banded Toeplitz matrix factorisation: noise correlated over rounds, so that no sampling is needed.

Where clients can't be sampled at random, there is no amplification. Instead round t releases x_t + clip·σ·(C⁻¹z)_t with
z ~ N(0, I) and a lower-triangular C: what one round adds, later rounds partly take back, and the running sum
(the model) gets less noise. All rounds together are one Gaussian mechanism on C·x, also when x_t depends on
earlier releases (Denisov et al. 2022). C is Toeplitz with b bands (Choquette-Choo et al. 2023): the first b
coefficients of the square root of the prefix-sum matrix (Kalinin & Lampert 2024), scaled to columns of norm 1.

Invariant: a client takes part at most once in b rounds (`server_app/cohort.py` sees to it), so each row of C·x holds at
most one of its updates, times at most c₀ (the largest coefficient), and sensitivities add up in squares.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_ROUNDING = 1e-12
"""Relative; what float64 may have lost in a sum of squares. Added, so that the sensitivity is never too small."""


def toeplitz_coefficients(rounds: int, bands: int) -> np.ndarray:
    """The first column of C: c_j ∝ binom(2j, j) / 4ʲ for j < bands, with ‖c‖ = 1. One band is independent noise."""
    if rounds < 1 or bands < 1:
        raise ValueError(f"rounds and bands must be ≥ 1 (got {rounds} and {bands})")
    j = np.arange(1, min(bands, rounds))
    coefficients = np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])
    return np.asarray(coefficients / np.linalg.norm(coefficients))


def sensitivity(coefficients: np.ndarray, rounds: int, min_separation: int, participations: int | None = None) -> float:
    """The largest L2 norm of C·u over one client's updates u, each of norm ≤ 1 and min_separation rounds apart.

    With bands ≤ min_separation the columns of two participations share no row, so it is the root of the sum of squared
    column norms. Columns only get shorter towards the last round: as early and as often as allowed is the worst.
    """
    if len(coefficients) > min_separation:
        raise ValueError(f"{len(coefficients)} bands need min_separation ≥ {len(coefficients)} (got {min_separation})")
    starts = range(0, rounds, min_separation)
    if participations is not None:
        starts = starts[:participations]
    squares = np.cumsum(np.square(coefficients))
    total = math.fsum(squares[min(len(squares), rounds - start) - 1] for start in starts)
    return math.sqrt(total) * (1 + _ROUNDING)


def banded_event(rounds: int, min_separation: int, noise_multiplier: float, spare_rounds: int = 0) -> "DpEvent":
    """What a whole job with bands = min_separation costs: one Gaussian.

    A round that is repeated after a crash releases one more row, with fresh noise, on top of the same earlier rounds.
    It too holds at most one update of a client, times at most c₀: each spare round adds c₀² to the squared sensitivity.
    """
    from dp_accounting import GaussianDpEvent  # heavy, and the server's noise needs this module without it

    coefficients = toeplitz_coefficients(rounds, min_separation)
    planned = sensitivity(coefficients, rounds, min_separation)
    repeated = spare_rounds * float(coefficients[0]) ** 2
    return GaussianDpEvent(noise_multiplier / math.sqrt(planned**2 + repeated))


class BandedNoise:
    """C⁻¹z row by row: y_t = (z_t − Σ c_j·y_{t−j}) / c₀ for 1 ≤ j < bands. Keeps the last bands − 1 rows.

    The rows kept are SECRET: with them, earlier noise can be taken off the model. They belong into the server's own
    checkpoints and nowhere else.
    """

    def __init__(self, coefficients: np.ndarray) -> None:
        self._coefficients = [float(c) for c in coefficients]
        self._rows: deque[np.ndarray] = deque(maxlen=len(coefficients) - 1)  # the newest first

    def correlate(self, normals: np.ndarray) -> np.ndarray:
        """The next row, from fresh standard normals. They must be fresh in a repeated round too."""
        row = np.array(normals, np.float64)
        for coefficient, earlier in zip(self._coefficients[1:], self._rows, strict=False):
            row -= coefficient * earlier
        row /= self._coefficients[0]
        self._rows.appendleft(row)
        return row.copy()

    def rows_after(self, rounds: int) -> int:
        """How many rows are kept after so many rounds."""
        return min(rounds, len(self._coefficients) - 1)

    def state_arrays(self) -> dict[str, np.ndarray]:
        """The rows kept, for a checkpoint."""
        return {f"{age:06d}": row for age, row in enumerate(self._rows, start=1)}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_arrays`; more rows than there are bands are refused."""
        if len(arrays) > len(self._coefficients) - 1 or sorted(arrays) != [f"{i + 1:06d}" for i in range(len(arrays))]:
            raise ValueError(f"not the noise of {len(self._coefficients)} bands: {', '.join(sorted(arrays)[:5])}")
        self._rows.clear()
        self._rows.extend(np.array(arrays[name], np.float64) for name in sorted(arrays))
