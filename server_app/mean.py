"""The weighted mean of updates, reduced as they arrive: constant memory, the same bits in any order.

Floating-point addition is not associative, so Flower's FedAvg changes its last bits when replies
come in another order, and it has to keep all replies. Here every coordinate becomes a 64-bit fixed-point
number (resolution 2⁻⁴⁰), and weighted sums are kept exactly, as integers, in two limbs: high · 2³² + low.
Integer addition is associative: order, number of workers and engine can't matter. It is also the
arithmetic of secure aggregation.

Limits: |x| < 2²² for floating-point coordinates, |x| < 2⁵² for integers (their mean is rounded), total
weight < 2³¹. All are checked, never wrapped.
"""

from collections.abc import Mapping, Sequence

import numpy as np

SCALE_BITS = 40
RANGE_BITS = 22
INTEGER_BITS = 52
MAX_TOTAL_WEIGHT = 2**31 - 1
_LIMB = 32
_MASK = np.int64(2**_LIMB - 1)
_ROOM = 2**63 - 1
"""What an int64 limb can hold."""
_CHUNK = 1 << 16
"""Coordinates per pass: the temporaries of one chunk stay in the cache, and memory stays constant."""


class MeanReducer:
    """Sums w·x over updates; `mean()` gives Σw·x / Σw in the dtypes of the template."""

    def __init__(self, template: Mapping[str, np.ndarray]) -> None:
        self._template = {name: (array.shape, array.dtype) for name, array in template.items()}
        self._high = {name: np.zeros(array.size, np.int64) for name, array in template.items()}
        self._low = {name: np.zeros(array.size, np.int64) for name, array in template.items()}
        self._low_bound = dict.fromkeys(template, 0)  # no |low| is larger; Python integers, so never wrapped
        self.total_weight = 0
        self.count = 0

    def add(self, arrays: Mapping[str, np.ndarray], weight: int) -> None:
        """Add one update, or raise ValueError and leave the sum as it was."""
        if not isinstance(weight, int) or weight < 1:
            raise ValueError(f"weight must be a whole number ≥ 1 (got {weight!r})")
        if self.total_weight + weight > MAX_TOTAL_WEIGHT:
            raise ValueError(f"total weight would exceed {MAX_TOTAL_WEIGHT}")
        peaks = self._validate(arrays)
        for name, array in arrays.items():
            self._add_array(name, array.reshape(-1), weight, peaks[name])
        self.total_weight += weight
        self.count += 1

    def add_stack(self, stacks: Mapping[str, np.ndarray], weights: Sequence[int]) -> None:
        """Add many checked updates, stacked along the first axis: the same bits as adding them one by one."""
        total = sum(weights)
        if self.total_weight + total > MAX_TOTAL_WEIGHT or min(weights) < 1:
            raise ValueError(f"weights must be ≥ 1 and sum to at most {MAX_TOTAL_WEIGHT}")
        bounds = {name: (int(peak(stack) * _scale_of(stack.dtype)) + 1) * total for name, stack in stacks.items()}
        if any(bound + 2**_LIMB > _ROOM for bound in bounds.values()):  # rare: the sum needs both limbs
            for row, weight in enumerate(weights):
                self.add({name: stack[row] for name, stack in stacks.items()}, weight)
            return
        column = np.array(weights, np.int64)[:, None]
        for name, stack in stacks.items():
            if self._low_bound[name] + bounds[name] > _ROOM:
                self._carry(name)
            self._low_bound[name] += bounds[name]
            self._add_rows(name, stack.reshape(len(weights), -1), column)
        self.total_weight += total
        self.count += len(weights)

    def _add_rows(self, name: str, rows: np.ndarray, weights: np.ndarray) -> None:
        scale, low = _scale_of(self._template[name][1]), self._low[name]
        width = max(1, _CHUNK // len(rows))
        for start in range(0, rows.shape[1], width):
            part = slice(start, start + width)
            scaled = np.multiply(rows[:, part], scale, dtype=np.float64)
            fixed = np.rint(scaled, out=scaled).astype(np.int64)
            fixed *= weights
            low[part] += fixed.sum(0)

    def _validate(self, arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The largest |x| of each array, once all are known to fit."""
        if arrays.keys() != self._template.keys():
            raise ValueError("names differ from the template")
        peaks: dict[str, float] = {}
        for name, array in arrays.items():
            if array.shape != self._template[name][0]:
                raise ValueError(f"'{name}' has shape {array.shape}, expected {self._template[name][0]}")
            limit = 2**RANGE_BITS if np.issubdtype(array.dtype, np.floating) else 2**INTEGER_BITS
            peaks[name] = peak(array)
            if not peaks[name] < limit:
                raise ValueError(f"'{name}' has a value outside ±{limit}")
        return peaks

    def _add_array(self, name: str, flat: np.ndarray, weight: int, peak: float) -> None:
        """low += fixed · weight where that surely fits into an int64; else both limbs get their half."""
        scale = _scale_of(self._template[name][1])
        term_bound = (int(peak * scale) + 1) * weight
        fits = term_bound + 2**_LIMB <= _ROOM
        if not fits:
            term_bound = (2**_LIMB - 1) * weight
        if self._low_bound[name] + term_bound > _ROOM:
            self._carry(name)
        self._low_bound[name] += term_bound
        high, low = self._high[name], self._low[name]
        for start in range(0, flat.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            scaled = np.multiply(flat[part], scale, dtype=np.float64)
            fixed = np.rint(scaled, out=scaled).astype(np.int64)
            if fits:
                fixed *= weight
                low[part] += fixed
            else:
                high[part] += (fixed >> _LIMB) * weight
                low[part] += (fixed & _MASK) * weight

    def _carry(self, name: str) -> None:
        """Move what is above 32 bits from the low limb to the high one; the number they stand for stays."""
        high, low = self._high[name], self._low[name]
        high += low >> _LIMB
        low &= _MASK
        self._low_bound[name] = 2**_LIMB - 1

    def mean(self) -> dict[str, np.ndarray]:
        if self.count == 0:
            raise ValueError("mean of no updates")
        return {name: self._mean_of(name) for name in self._template}

    def forget(self) -> None:
        """Give the sums' memory back: they are up to four times as large as their mean."""
        self._high, self._low = {}, {}

    def _mean_of(self, name: str) -> np.ndarray:
        shape, dtype = self._template[name]
        divisor = self.total_weight * _scale_of(dtype)
        mean = np.empty(self._low[name].size, dtype)
        for start in range(0, mean.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            # Carry first: then the low limb is below 2³² and the sum of the two floats rounds only once.
            high = self._high[name][part] + (self._low[name][part] >> _LIMB)
            low = self._low[name][part] & _MASK
            exact = (high * float(2**_LIMB) + low) / divisor
            mean[part] = exact if np.issubdtype(dtype, np.floating) else np.rint(exact)
        return mean.reshape(shape)


def peak(array: np.ndarray) -> float:
    """The largest |x|. max and min see NaN and infinities too, and need no temporary of the array's size."""
    if array.size == 0:
        return 0.0
    return float(np.maximum(float(array.max()), -float(array.min())))


def _scale_of(dtype: np.dtype) -> float:
    return float(2**SCALE_BITS) if np.issubdtype(dtype, np.floating) else 1.0
