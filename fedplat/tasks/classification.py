"""What the built-in tasks share: one label per example, cross-entropy, accuracy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedplat.task import Examples, Task


class Classification(Task):
    """A task with integer class targets and a model that returns logits."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    def metrics(self, outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == targets).float()}


def split_table(inputs: np.ndarray, targets: np.ndarray, split: str, test_share: float = 0.2) -> Examples:
    """A fixed train/test split. It is part of the task, so it doesn't depend on the job's seed."""
    order = np.random.default_rng(20170217).permutation(len(targets))
    cut = round(len(order) * test_share)
    rows = order[:cut] if split == "test" else order[cut:]
    return Examples(torch.from_numpy(inputs[rows].astype(np.float32)), torch.from_numpy(targets[rows].astype(np.int64)))
