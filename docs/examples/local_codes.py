"""Sites that mean the same and write it differently: each has its own code for every digit.

The images are those of the task `digits`. A shared first layer helps all sites; a shared last layer
can please only one.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification
from fedplat.tasks.digits import Digits


class LocalCodes(Classification):
    def __init__(self, data_dir: Path, sites: int = 10) -> None:
        super().__init__(data_dir)
        self.sites = sites

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def data(self, split: Split) -> Examples:
        """Consecutive blocks, one per site: use it with partition kind `range`."""
        digits = Digits(self.data_dir).data(split)
        random = np.random.default_rng(7)
        blocks = np.array_split(digits.targets.numpy(), self.sites)
        coded = np.concatenate([random.permutation(10)[block] for block in blocks])
        return Examples(digits.inputs, torch.from_numpy(coded))
