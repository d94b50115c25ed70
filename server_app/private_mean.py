"""Client-level privacy, the server's half: the noisy mean of clipped updates, in place of `MeanReducer`.

The Gaussian mechanism of DP-FedAvg (McMahan et al. 2018), which trusts the server with single updates. A round releases
model + (Σ clip(x_i − model, C) + N(0, (z·C)²)) / n₀ and nothing else. Invariants, whatever clients send:
- One client moves the sum by at most C. Each update is clipped here again and rounded towards zero to whole multiples
  of a power of two (about C·2⁻³⁰), which never lengthens it; the norm of those whole numbers is verified exactly.
- Sums are integers: exact, the same bits in any order, checked so that they never wrap.
- n₀ and the noise are constants of the job. Fewer replies, or none, mean fewer summands, never less noise.
- Noise is drawn once per round, from the operating system's randomness, and added before one rounding to the noise
  grid (see `privacy/gaussian.py`). Asking twice gives the same release, not a second draw.
Integer and boolean arrays keep the model's values: they are no part of the release.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedplat import wire
from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.model import Arrays
from fedplat.privacy_section import AdaptiveClip
from privacy import plan_of
from privacy.banded import BandedNoise, toeplitz_coefficients
from privacy.clip_norm import next_clip_norm, noisy_share
from privacy.gaussian import add_gaussian, grid_of, standard_normals
from privacy.randomness import Keystream, insecure_stream, secure_stream
from server_app.adaptive_clip import without_clip_norm
from server_app.checks import NOT_FINITE, update_norm

GRID_BITS = 30
MAX_UPDATES = 2**21
"""Of one round: their sum stays below 2⁵³ steps of the grid, so float64 holds it exactly when noise is added."""
_MARGIN = 1 - 2.0**-32
"""Clip a little below C: more than float64 can be wrong about a norm."""
_CHUNK = 1 << 16
NOISE_STATE = "privacy/noise/"
"""Names of the noise in a checkpoint, beside the strategy's arrays."""


@dataclass(frozen=True)
class Mechanism:
    """The constants of one round's release: all public."""

    clip_norm: float
    noise_multiplier: float
    """0 only in tests: a plan never has it."""
    normaliser: float
    adaptive: AdaptiveClip | None = None
    count_noise: float = 0.0

    @property
    def std(self) -> float:
        return self.noise_multiplier * self.clip_norm


class PrivateMean:
    """Sums one round's clipped updates; `mean()` releases. `model` is what the round started from."""

    total_weight = 1
    """Of the mean, as a strategy sees it: a constant."""

    def __init__(
        self,
        model: Mapping[str, np.ndarray],
        mechanism: Mechanism,
        stream: Keystream,
        banded: BandedNoise | None = None,
    ) -> None:
        self._model, self._mechanism, self._stream, self._banded = dict(model), mechanism, stream, banded
        weights = without_clip_norm(model)
        self._floats = [name for name, array in weights.items() if np.issubdtype(array.dtype, np.floating)]
        self._grid = math.ldexp(1.0, math.frexp(mechanism.clip_norm)[1] - 1 - GRID_BITS)
        self._largest_square = int(Fraction(mechanism.clip_norm / self._grid) ** 2)
        self._sum = np.zeros(sum(self._model[name].size for name in self._floats), np.int64)
        self._below = 0
        self._released: Arrays | None = None
        self.count = 0

    def add(self, arrays: Mapping[str, np.ndarray], weight: int) -> None:
        """Add one update, or raise ValueError and leave the sum as it was."""
        if weight != 1:
            raise ValueError(f"updates of a client-level private job weigh 1 each (got {weight!r})")
        if self._released is not None:
            raise ValueError("this round was released already")
        if self.count >= MAX_UPDATES:
            raise ValueError(f"more than {MAX_UPDATES} updates in one round")
        self._require_fit(arrays)
        below = self._below_of(arrays)
        steps = self._clipped(arrays)
        self._sum += steps
        self._below += below
        self.count += 1

    def add_stack(self, stacks: Mapping[str, np.ndarray], weights: Sequence[int]) -> None:
        """Add many updates, stacked along the first axis: the same bits as adding them one by one."""
        for row, weight in enumerate(weights):
            self.add({name: stack[row] for name, stack in stacks.items()}, weight)

    def _require_fit(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays.keys() != self._model.keys():
            raise ValueError("names differ from the model's")
        for name, array in arrays.items():
            if array.shape != self._model[name].shape:
                raise ValueError(f"'{name}' has shape {array.shape}, expected {self._model[name].shape}")

    def _below_of(self, arrays: Mapping[str, np.ndarray]) -> int:
        if self._mechanism.adaptive is None:
            return 0
        below = float(arrays[wire.CLIP_NORM])
        if below not in (0.0, 1.0):
            raise ValueError(f"'{wire.CLIP_NORM}' must be 1 (the norm was below) or 0 (got {below:g})")
        return int(below)

    def _clipped(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The update in whole steps of the grid, with a norm of at most C: verified in integers, never assumed."""
        norm = update_norm({name: arrays[name] for name in self._floats}, self._model)
        if not math.isfinite(norm):
            raise ValueError(NOT_FINITE)
        most = self._mechanism.clip_norm * _MARGIN
        factor = (most / norm if norm > most else 1.0) / self._grid
        steps = np.empty_like(self._sum)
        first = 0
        for name in self._floats:
            x, origin = arrays[name].reshape(-1), self._model[name].reshape(-1)
            for start in range(0, x.size, _CHUNK):
                part = slice(start, start + _CHUNK)
                delta = np.subtract(x[part], origin[part], dtype=np.float64)
                delta *= factor
                steps[first : first + delta.size] = np.trunc(delta, out=delta)
                first += delta.size
        # C is less than 2³¹ steps and the norm was bounded in float64, so this sum of squares can't wrap.
        if int(np.dot(steps, steps)) > self._largest_square:
            raise ValueError("the clipped update is longer than the clip norm")
        return steps

    def mean(self) -> Arrays:
        """The release, drawn when first asked for: the next model, and the next clip norm if it adapts."""
        if self._released is None:
            self._released = self._release()
        return self._released

    def forget(self) -> None:
        """Give the sum's memory back, once it is released."""
        if self._released is not None:
            self._sum = np.zeros(0, np.int64)

    def _release(self) -> Arrays:
        change = self._noisy_sum()
        change /= self._mechanism.normaliser
        released, first = dict(self._model), 0
        for name in self._floats:
            array = self._model[name]
            part = change[first : first + array.size].reshape(array.shape)
            with np.errstate(over="ignore"):
                released[name] = np.asarray(array + part).astype(array.dtype)
            first += array.size
        if self._mechanism.adaptive is not None:
            old = self._model[wire.CLIP_NORM]
            released[wire.CLIP_NORM] = np.array(self._next_clip_norm(self._mechanism.adaptive), old.dtype)
        return released

    def _noisy_sum(self) -> np.ndarray:
        total, std = self._sum * self._grid, self._mechanism.std
        if std == 0:
            return total
        if self._banded is None:
            return add_gaussian(total, std, self._stream, out=total)
        noise = self._banded.correlate(standard_normals(self._stream, total.size))
        return _add_on_grid(total, noise, std)

    def _next_clip_norm(self, adaptive: AdaptiveClip) -> float:
        mechanism = self._mechanism
        share = noisy_share(self._below, self.count, mechanism.normaliser, mechanism.count_noise, self._stream)
        return next_clip_norm(mechanism.clip_norm, share, adaptive)


def _add_on_grid(values: np.ndarray, noise: np.ndarray, std: float) -> np.ndarray:
    """values + std·noise, rounded once to the noise grid; as in `add_gaussian`, the sum that is rounded is small."""
    grid = grid_of(std)
    scaled = values / grid
    point = np.rint(scaled)
    scaled -= point
    scaled += noise * (std / grid)
    return np.asarray((np.rint(scaled) + point) * grid)


class CentralNoise:
    """The server's noise over a whole run of a job with unit client."""

    def __init__(self, job: Job) -> None:
        plan = plan_of(job)
        if plan is None or plan.section.unit != "client":
            raise ValueError("only jobs with privacy.unit = 'client' have noise at the server")
        self._plan, self._seed = plan, job.job.seed
        bands = plan.section.min_separation if plan.section.sampling == "banded" else None
        self._banded = None if bands is None else BandedNoise(toeplitz_coefficients(plan.rounds, bands))

    @classmethod
    def of(cls, job: Job) -> "CentralNoise | None":
        return cls(job) if job.privacy is not None and job.privacy.unit == "client" else None

    def reducer(self, round_number: int, model: Mapping[str, np.ndarray]) -> PrivateMean:
        """The mean of one round: independent noise, or the next row of a banded factorisation."""
        plan, section = self._plan, self._plan.section
        clip_norm = float(model[wire.CLIP_NORM]) if section.adaptive is not None else section.clip_norm
        mechanism = Mechanism(
            clip_norm, plan.update_noise, plan.normaliser, section.adaptive, count_noise=plan.count_noise or 0.0
        )
        insecure = section.insecure_noise
        stream = insecure_stream(self._seed, "server-noise", round_number) if insecure else secure_stream()
        return PrivateMean(model, mechanism, stream, self._banded)

    def state_arrays(self) -> Arrays:
        """What later rounds' noise builds upon. SECRET: it is part of the server's own checkpoints only."""
        rows = {} if self._banded is None else self._banded.state_arrays()
        return {NOISE_STATE + name: row for name, row in rows.items()}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray], round_number: int) -> None:
        """Continue after a checkpoint of that round."""
        if self._banded is None:
            return
        rows = {name.removeprefix(NOISE_STATE): row for name, row in arrays.items() if name.startswith(NOISE_STATE)}
        if len(rows) != self._banded.rows_after(round_number):
            raise UsageError(
                "the checkpoint lacks the noise of earlier rounds, so what comes next would not be private: start anew"
            )
        self._banded.load_state_arrays(rows)
