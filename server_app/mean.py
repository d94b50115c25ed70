"""The weighted mean of updates, reduced as they arrive: constant memory, the same bits in any order.

Floating-point addition is not associative, so Flower's FedAvg changes its last bits when replies
come in another order, and it has to keep all replies. Here every coordinate becomes a 64-bit fixed-point
number (resolution 2⁻⁴⁰), and weighted sums are kept exactly, as integers, in two limbs of 32 bits.
Integer addition is associative: order, number of workers and engine can't matter. It is also the
arithmetic of secure aggregation.

Limits: |x| < 2²² for floating-point coordinates, |x| < 2⁵² for integers (their mean is rounded), total
weight < 2³¹. All are checked, never wrapped.
"""

from collections.abc import Mapping

import numpy as np

SCALE_BITS = 40
RANGE_BITS = 22
INTEGER_BITS = 52
MAX_TOTAL_WEIGHT = 2**31 - 1
_LIMB = 32
_MASK = np.int64(2**_LIMB - 1)
_CHUNK = 1 << 16
"""Coordinates per pass: the temporaries of one chunk stay in the cache, and memory stays constant."""


class MeanReducer:
    """Sums w·x over updates; `mean()` gives Σw·x / Σw in the dtypes of the template."""

    def __init__(self, template: Mapping[str, np.ndarray]) -> None:
        self._template = {name: (array.shape, array.dtype) for name, array in template.items()}
        self._high = {name: np.zeros(array.size, np.int64) for name, array in template.items()}
        self._low = {name: np.zeros(array.size, np.int64) for name, array in template.items()}
        self.total_weight = 0
        self.count = 0

    def add(self, arrays: Mapping[str, np.ndarray], weight: int) -> None:
        """Add one update, or raise ValueError and leave the sum as it was."""
        if not isinstance(weight, int) or weight < 1:
            raise ValueError(f"weight must be a whole number ≥ 1 (got {weight!r})")
        if self.total_weight + weight > MAX_TOTAL_WEIGHT:
            raise ValueError(f"total weight would exceed {MAX_TOTAL_WEIGHT}")
        self._validate(arrays)
        for name, array in arrays.items():
            self._add_array(name, array.reshape(-1), weight)
        self.total_weight += weight
        self.count += 1

    def _validate(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays.keys() != self._template.keys():
            raise ValueError("names differ from the template")
        for name, array in arrays.items():
            if array.shape != self._template[name][0]:
                raise ValueError(f"'{name}' has shape {array.shape}, expected {self._template[name][0]}")
            limit = 2**RANGE_BITS if np.issubdtype(array.dtype, np.floating) else 2**INTEGER_BITS
            # max and min see NaN and infinities too, and need no temporary of the array's size.
            if array.size and not (array.max() < limit and array.min() > -limit):
                raise ValueError(f"'{name}' has a value outside ±{limit}")

    def _add_array(self, name: str, flat: np.ndarray, weight: int) -> None:
        scale = _scale_of(self._template[name][1])
        high, low = self._high[name], self._low[name]
        for start in range(0, flat.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            fixed = np.rint(np.multiply(flat[part], scale, dtype=np.float64)).astype(np.int64)
            high[part] += (fixed >> _LIMB) * weight
            low[part] += (fixed & _MASK) * weight

    def mean(self) -> dict[str, np.ndarray]:
        if self.count == 0:
            raise ValueError("mean of no updates")
        return {name: self._mean_of(name) for name in self._template}

    def _mean_of(self, name: str) -> np.ndarray:
        shape, dtype = self._template[name]
        # Carry first: then the low limb is below 2³² and the sum of the two floats rounds only once.
        high = self._high[name] + (self._low[name] >> _LIMB)
        low = self._low[name] & _MASK
        total = high * float(2**_LIMB) + low
        mean = total / (self.total_weight * _scale_of(dtype))
        return (mean if np.issubdtype(dtype, np.floating) else np.rint(mean)).astype(dtype).reshape(shape)


def _scale_of(dtype: np.dtype) -> float:
    return float(2**SCALE_BITS) if np.issubdtype(dtype, np.floating) else 1.0
