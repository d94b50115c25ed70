"""What a strategy remembers between rounds, as arrays that a checkpoint can hold.

One codec per strategy, matched by exact type: a subclass may remember more than its parent.
A strategy without a codec still trains and is still checkpointed, but such a run refuses to
resume: guessing its state would give a different model without a word. Your own strategy joins in
by having `state_arrays()` and `load_state_arrays(arrays)`.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedplat.model import Arrays
from fedplat.wire import decode_arrays, encode_arrays
from server_app.scaffold import Scaffold

_STATELESS = (FedAvg, FedProx, FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg, Scaffold)
_MOMENTS = (FedAdagrad, FedAdam, FedYogi)


@runtime_checkable
class RemembersArrays(Protocol):
    """A strategy that brings its own codec."""

    def state_arrays(self) -> Arrays: ...
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None: ...


def encode_state(strategy: Strategy) -> Arrays | None:
    """The strategy's memory; empty if it has none; None if this strategy has no codec."""
    if isinstance(strategy, RemembersArrays):
        return strategy.state_arrays()
    if type(strategy) in _STATELESS:
        return {}
    if isinstance(strategy, FedAvgM) and type(strategy) is FedAvgM:
        current = decode_arrays(strategy.current_arrays) if strategy.current_arrays is not None else {}
        momentum = {f"{i:06d}": v for i, v in enumerate(strategy.momentum_vector or [])}
        return _prefixed("current", current) | _prefixed("momentum", momentum)
    if isinstance(strategy, _MOMENTS) and type(strategy) in _MOMENTS:
        return _prefixed("m", strategy.m_t or {}) | _prefixed("v", strategy.v_t or {})
    return None


def decode_state(strategy: Strategy, arrays: Mapping[str, np.ndarray]) -> None:
    """Give a freshly built strategy the memory that `encode_state` wrote."""
    if isinstance(strategy, RemembersArrays):
        strategy.load_state_arrays(arrays)
    elif isinstance(strategy, FedAvgM):
        strategy.current_arrays = encode_arrays(_group("current", arrays)) if _group("current", arrays) else None
        strategy.momentum_vector = list(_group("momentum", arrays).values()) or None
    elif isinstance(strategy, _MOMENTS):
        strategy.m_t = _group("m", arrays) or None
        strategy.v_t = _group("v", arrays) or None


def _prefixed(group: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    # A 0-d buffer comes out of a strategy's arithmetic as a NumPy scalar, which safetensors can't hold.
    # The position keeps the order of the model's tensors, which a safetensors file does not.
    return {f"{group}/{i:06d}/{name}": np.asarray(array) for i, (name, array) in enumerate(arrays.items())}


def _group(group: str, arrays: Mapping[str, np.ndarray]) -> Arrays:
    ordered = sorted(name for name in arrays if name.startswith(f"{group}/"))
    return {name.split("/", 2)[2]: arrays[name] for name in ordered}
