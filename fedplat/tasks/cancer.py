"""`cancer`: the Wisconsin breast-cancer table that scikit-learn ships, 569 patients, 30 measurements.

The hospital story: each site holds some patients, and one model tells malignant from benign.
Measurements are scaled by fixed public constants. Scaling by the mean and deviation of private data
would be a release of its own.
"""

from pathlib import Path

import numpy as np
from torch import nn

from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification, split_table

# Rough centre and spread of each measurement (ten means, ten standard errors, ten worst values).
_CENTRE = [14, 19, 92, 650, 0.1, 0.1, 0.09, 0.05, 0.18, 0.06,
           0.4, 1.2, 2.9, 40, 0.007, 0.025, 0.03, 0.012, 0.02, 0.004,
           16, 26, 107, 880, 0.13, 0.25, 0.27, 0.11, 0.29, 0.084]  # fmt: skip
_SPREAD = [3.5, 4.3, 24, 350, 0.014, 0.05, 0.08, 0.04, 0.03, 0.007,
           0.28, 0.55, 2, 45, 0.003, 0.018, 0.03, 0.006, 0.008, 0.0026,
           4.8, 6.1, 34, 570, 0.023, 0.16, 0.21, 0.066, 0.06, 0.018]  # fmt: skip


class Cancer(Classification):
    def __init__(self, data_dir: Path, hidden: int = 16) -> None:
        super().__init__(data_dir)
        self.hidden = hidden

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(30, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def data(self, split: Split) -> Examples:
        from sklearn.datasets import load_breast_cancer

        table = load_breast_cancer()
        scaled = (table.data - np.array(_CENTRE)) / np.array(_SPREAD)
        return split_table(scaled, table.target, split)
