"""`digits`: the UCI handwritten digits that scikit-learn ships, 1797 images of 8×8, ten classes."""

from pathlib import Path

from torch import nn

from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification, split_table


class Digits(Classification):
    def __init__(self, data_dir: Path, hidden: int = 128) -> None:
        super().__init__(data_dir)
        self.hidden = hidden

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

    def data(self, split: Split) -> Examples:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return split_table(digits.data / 16.0, digits.target, split)
