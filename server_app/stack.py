"""Updates of many clients as one stack: what a Grid that computes many clients at once can deliver.

Wrapping each row into a Flower message only to unwrap it again would cost more than training a small
model. So a Grid may offer `pull_updates`, which returns messages and stacks. The same checks hold for a row of a
stack as for a message, and the mean has the same bits.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from flwr.app import Message

from fedplat.model import Arrays
from fedplat.wire import Identity


@dataclass(frozen=True)
class UpdateStack:
    """Row i of every array and column belongs to the client that answers message_ids[i]."""

    message_ids: list[str]
    identities: list[Identity]
    num_examples: list[int]
    metrics: dict[str, np.ndarray]
    arrays: Arrays

    def __len__(self) -> int:
        return len(self.message_ids)

    def row_metrics(self, row: int) -> dict[str, float]:
        return {name: float(values[row]) for name, values in self.metrics.items()}

    def row_arrays(self, row: int) -> Arrays:
        return {name: array[row] for name, array in self.arrays.items()}


@runtime_checkable
class DeliversStacks(Protocol):
    """A Grid that can hand over stacks."""

    def pull_updates(self, message_ids: Collection[str]) -> list[Message | UpdateStack]: ...


@runtime_checkable
class KnowsItsFuture(Protocol):
    """A simulated Grid, which knows when none of these messages will ever be answered."""

    def nothing_to_come(self, message_ids: Collection[str]) -> bool: ...
