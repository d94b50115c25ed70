"""A model of any size that costs almost nothing to train, `task.name = "benchmarks.large_model:LargeModel"`.

One wide layer holds nearly all parameters, and each client takes one step on a handful of examples: what is left of a
round is moving the model and averaging it.
"""

from pathlib import Path

import torch
from torch import nn

from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification

TASK = "benchmarks.large_model:LargeModel"
INPUTS, CLASSES, EXAMPLES = 1000, 10, 32


class LargeModel(Classification):
    def __init__(self, data_dir: Path, parameters: int) -> None:
        super().__init__(data_dir)
        self.width = max(1, parameters // (INPUTS + 1 + CLASSES))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, self.width), nn.ReLU(), nn.Linear(self.width, CLASSES))

    def data(self, split: Split) -> Examples:
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        inputs = torch.randn(EXAMPLES, INPUTS, generator=generator)
        return Examples(inputs, torch.randint(CLASSES, (EXAMPLES,), generator=generator))
